"""Metadata that vLLM builds of every batch for the plugin's attention, prompts and steps alike."""

from dataclasses import dataclass

from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from surgery_vllm.spans import Span, spans_of, steps_in_front


@dataclass
class Steps:
    """Requests with one new token each, at the front of a batch, for kernels.

    Both tensors are vLLM's own memory on the device, which a CUDA graph finds again at every replay.

    Attributes:
        pages: [B, n] int32, for as many tokens as any request may have.
        lengths: [B] int32, tokens of each request, the new one included; 0 of padding.
    """

    pages: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class PagedMetadata(AttentionMetadata):
    """One batch. Its requests are in spans, but for those that kernels take: these are `steps`."""

    spans: list[Span]
    slot_mapping: Tensor
    steps: Steps | None = None


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Requests that decode come first in a batch, so that they make one span, or the steps of kernels.

    Attributes:
        has_kernels: whether these read the steps.
    """

    reorder_batch_threshold = 1
    has_kernels = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        query_lens = common.query_start_loc_cpu.diff().tolist()
        count = steps_in_front(query_lens) if self.has_kernels else 0
        table, seq_lens = common.block_table_tensor, common.seq_lens
        spans = []
        if any(query_lens[count:]):
            lengths, exact = host_lengths(common, self.vllm_config.speculative_config is not None)
            spans = spans_of(query_lens, lengths, table, seq_lens, self.kv_cache_spec.block_size, exact, skip=count)
        return PagedMetadata(
            spans=spans,
            slot_mapping=common.slot_mapping,
            steps=Steps(table[:count], seq_lens[:count]) if count else None,
        )


def host_lengths(common: CommonAttentionMetadata, speculative: bool) -> tuple[list[int], bool]:
    """Tokens of every request as far as the host knows them without a wait, and whether those are exact.

    With speculative decoding vLLM counts every draft as accepted; otherwise its upper bounds are the lengths.
    """
    if common.seq_lens_cpu_upper_bound is None:
        return [common.max_seq_len] * common.num_reqs, False
    return common.seq_lens_cpu_upper_bound.tolist(), not speculative
