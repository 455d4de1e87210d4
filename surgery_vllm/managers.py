"""Registration of our KV cache managers with vLLM."""

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


def register(spec: type[KVCacheSpec], manager: type[SingleTypeKVCacheManager]) -> None:
    """Register the manager of a spec; called when the spec's module is imported.

    The engine core may be a process that only unpickles the specs, which imports their modules and runs nothing else.
    """
    KVCacheSpecRegistry._ensure_registered()  # vLLM registers its built-in managers only while the registry is empty
    KVCacheSpecRegistry.register(spec, manager)
