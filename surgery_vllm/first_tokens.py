"""KV cache group of vLLM for first tokens in full precision: one block per request, whatever its length.

The blocks come from vLLM's pool: a preempted request frees them, and a prefix hit needs both the rows and the first
block. After the first block a request has null blocks, which take no memory. Slots of later tokens are in vLLM's null
block, which no request reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from surgery_vllm.managers import lookup, register


@dataclass(frozen=True, kw_only=True)
class FirstTokensSpec(AttentionSpec):
    """Spec of a group with one block per request."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of a request: one block."""
        return self.page_size_bytes


class FirstTokensManager(SingleTypeKVCacheManager):
    """Manager of one block per request, followed by null blocks."""

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *rest, **kwargs
    ) -> int:
        """Return the number of free blocks that a request needs."""
        if self.req_to_blocks.get(request_id):
            return 0
        return self._get_num_evictable_blocks(new_computed_blocks) if new_computed_blocks else 1

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Extend a request's block list to `num_tokens`: one block at first, then null blocks."""
        blocks = self.req_to_blocks[request_id]
        count = cdiv(num_tokens, self.block_size) - len(blocks)
        if count <= 0:
            return []
        first = [] if blocks else self.block_pool.get_new_blocks(1)
        new_blocks = first + [self._null_block] * (count - len(first))
        blocks.extend(new_blocks)
        return new_blocks

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **parallel_sizes: int,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return a hit of the whole prefix if its first block is cached, else no hit."""
        assert not drop_eagle_block
        cached = lookup(cls, block_hashes, kv_cache_group_ids, block_pool, kv_cache_spec, alignment_tokens)
        length = max_length - max_length % alignment_tokens
        first = length and cached(0)
        if not first:
            return tuple([] for _ in kv_cache_group_ids), 0
        later = [block_pool.null_block] * (length // kv_cache_spec.block_size - 1)
        return tuple([block, *later] for block in first), length


register(FirstTokensSpec, FirstTokensManager)
