"""KV cache group of vLLM for streaming heads: blocks between sinks and window are freed."""

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from surgery_vllm.managers import lookup, register


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """Spec of a window of ``sliding_window`` tokens, the query's own included, and the first ``sinks`` tokens."""

    sinks: int

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that a request holds, with `max_in_flight_tokens` scheduled at once."""
        window = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return min(cdiv(self.sinks, self.block_size) + window, cdiv(max_model_len, self.block_size))


class SinkWindowManager(SlidingWindowManager):
    """Manager that keeps the blocks of sinks and window, frees those in between, and finds prefix hits."""

    def __init__(self, kv_cache_spec: SinkWindowSpec, **more):
        super().__init__(kv_cache_spec, **more)
        self.sink_blocks = cdiv(kv_cache_spec.sinks, self.block_size)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return 0: the sinks at the start are kept."""
        return 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks between the sinks and the window of the next token."""
        num_skipped = super().get_num_skipped_tokens(processed_computed_tokens)
        self._remove_blocks_in_range(request_id, self.sink_blocks, num_skipped // self.block_size)

    @classmethod
    def reachable_block_mask(cls, *args, **more) -> None:
        """Return None: any cached block can be part of a prefix hit."""

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
        """Return the longest prefix whose sinks and window are cached, with null blocks in between."""
        assert isinstance(kv_cache_spec, SinkWindowSpec)
        assert not drop_eagle_block
        cached = lookup(cls, block_hashes, kv_cache_group_ids, block_pool, kv_cache_spec, alignment_tokens)
        size = kv_cache_spec.block_size
        cached_blocks = [cached(number) for number in range(max_length // size)]
        sinks = cdiv(kv_cache_spec.sinks, size)
        for end in range(len(cached_blocks), 0, -1):
            window = max(end * size - kv_cache_spec.sliding_window + 1, 0) // size
            needed = {*range(min(sinks, end)), *range(window, end)}
            if end * size % alignment_tokens == 0 and all(cached_blocks[i] for i in needed):
                blocks = [cached_blocks[i] if i in needed else None for i in range(end)]
                groups = range(len(kv_cache_group_ids))
                hit = tuple([block[g] if block else block_pool.null_block for block in blocks] for g in groups)
                return hit, end * size
        return tuple([] for _ in kv_cache_group_ids), 0


register(SinkWindowSpec, SinkWindowManager)
