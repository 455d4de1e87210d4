"""Attention metadata of a batch, and its builder, for the plugin's backends."""

from dataclasses import dataclass

from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from surgery_vllm.spans import Span, num_leading_steps, spans_of


@dataclass
class Steps:
    """Decode requests, with one new token each, at the front of a batch; read by kernels.

    Both tensors are vLLM's persistent buffers on the device, so that CUDA graphs can be replayed.

    Attributes:
        pages: block table [B, n] int32, n blocks for the longest possible request.
        lengths: sequence lengths [B] int32, the new token included; 0 for padding.
    """

    pages: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class PagedMetadata(AttentionMetadata):
    """Metadata of one batch: `steps` are the requests that kernels read, `spans` all others."""

    spans: list[Span]
    slot_mapping: Tensor
    steps: Steps | None = None


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Builder that has decode requests sorted to the front of a batch, where they form spans or `Steps`.

    Attributes:
        has_kernels: whether kernels read the decode requests.
    """

    reorder_batch_threshold = 1
    has_kernels = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):  # abstract in vLLM
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        query_lens = common.query_start_loc_cpu.diff().tolist()
        count = num_leading_steps(query_lens) if self.has_kernels else 0
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
    """Return upper bounds of the sequence lengths without a wait for the device, and whether they are exact.

    With speculative decoding vLLM counts every draft token as accepted; otherwise its upper bounds are exact.
    """
    if common.seq_lens_cpu_upper_bound is None:
        return [common.max_seq_len] * common.num_reqs, False
    return common.seq_lens_cpu_upper_bound.tolist(), not speculative
