"""Metadata that vLLM builds of every batch for the plugin's attention, prompts and steps alike."""

from dataclasses import dataclass

from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from surgery_vllm.spans import Span, spans_of


@dataclass
class PagedMetadata(AttentionMetadata):
    """One batch."""

    spans: list[Span]
    slot_mapping: Tensor


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Requests that decode come first in a batch, so that they make one span."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        query_lens = common.query_start_loc_cpu.diff().tolist()
        lengths, exact = host_lengths(common, self.vllm_config.speculative_config is not None)
        page = self.kv_cache_spec.block_size
        return PagedMetadata(
            spans=spans_of(query_lens, lengths, common.block_table_tensor, common.seq_lens, page, exact),
            slot_mapping=common.slot_mapping,
        )


def host_lengths(common: CommonAttentionMetadata, speculative: bool) -> tuple[list[int], bool]:
    """Tokens of every request as far as the host knows them without a wait, and whether those are exact.

    With speculative decoding vLLM counts every draft as accepted; otherwise its upper bounds are the lengths.
    """
    if common.seq_lens_cpu_upper_bound is None:
        return [common.max_seq_len] * common.num_reqs, False
    return common.seq_lens_cpu_upper_bound.tolist(), not speculative
