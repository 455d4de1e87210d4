"""Shared code of our KV cache managers: registration with vLLM, and the lookup of cached blocks."""

from collections.abc import Callable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


def register(spec: type[KVCacheSpec], manager: type[SingleTypeKVCacheManager]) -> None:
    """Register the manager of a spec; called when the spec's module is imported.

    The engine core may be a process that only unpickles the specs, which imports their modules and runs nothing else.
    """
    KVCacheSpecRegistry._ensure_registered()  # vLLM registers its built-in managers only while the registry is empty
    KVCacheSpecRegistry.register(spec, manager)


def lookup(
    manager: type[SingleTypeKVCacheManager],
    block_hashes: BlockHashList,
    groups: list[int],
    pool: BlockPool,
    spec: KVCacheSpec,
    alignment: int,
) -> Callable[[int], list[KVCacheBlock] | None]:
    """Return a function from the number of a block to its cached blocks in the groups, or None."""
    hashes = resolve_block_hashes(
        block_hashes,
        pool.hash_block_size,
        spec.block_size,
        supports_fine_grained_hash_lookup=manager.supports_fine_grained_hash_lookup,
        alignment_tokens=alignment,
    )
    return lambda number: pool.get_cached_block(hashes[number], groups)
