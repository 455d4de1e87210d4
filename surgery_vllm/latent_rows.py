"""MLA in bits whose decode steps kernels read: rows are unpacked to the ends of their own blocks, one layer at a time.

`mla_decode_packed` would unpack to memory for requests as long as vLLM's longest, which a CUDA graph has to reserve.
Blocks have memory for the tokens that there are.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config

from surgery.kernels.lowrank_decode.reference import rotation_tables
from surgery.kernels.mla_decode.packed_operator import within_lanes
from surgery.kernels.pack_rows.operator import pack_rows
from surgery.kernels.unpack_rows.operator import unpack_rows
from surgery.model.layer_entry import LayerEntry
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery.model.token_quantizer import TokenQuantizer, with_gains
from surgery_vllm.backend import PagedMetadata
from surgery_vllm.rows import RowCache
from surgery_vllm.steps import logged, over_pages, refusal_of_kernels


class LatentRows(RowCache):
    """The rows of a layer of MLA.

    Args:
        in_latents: outputs [T, H, ·] of queries as the layer hands them over, by attention of queries [T, H, r + ρ] in
            the space of the latents, which gives [T, H, r].
    """

    def __init__(
        self,
        config: Any,
        quantizer: TokenQuantizer,
        inv_freq: Tensor,
        in_latents: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor],
        **settings: Any,
    ):
        super().__init__(config, quantizer, inv_freq, **settings)
        self.in_latents = in_latents
        self.fields = fields_of(self.entry)
        if self.layout.unpacked:
            positions = get_current_vllm_config().model_config.max_model_len
            self.rotation = rotation_tables(inv_freq, positions) if len(inv_freq) else None

    def refusal_of(self, layers: Sequence[LayerEntry], vllm_config: VllmConfig) -> str | None:
        """Return why no kernel reads the steps of a model's layers; None if one does."""
        if not all(isinstance(entry, QuantizedLatentEntry) for entry in layers):
            return "low rank in bits"
        reasons = [within_lanes(fields_of(entry)) for entry in layers]
        reasons.append(refusal_of_kernels(torch.get_default_dtype(), torch.device(vllm_config.device_config.device)))
        return logged(next(filter(None, reasons), None))

    def refusal(self) -> str | None:
        """Return why no kernel reads the steps of this loaded layer; None: one does."""
        pairs = self.quantizer.step[self.entry.kv_lora_rank :].view(-1, 2)
        return None if torch.equal(pairs[:, 0], pairs[:, 1]) else "rotated pairs with two steps"

    def pack(self, vectors: Tensor) -> Tensor:
        """Pack values and gains [T, r + ρ + G] into rows [T, bytes], by a kernel where steps have one."""
        if not self.layout.unpacked:
            return super().pack(vectors)
        values, gains = vectors.tensor_split([self.entry.format.channels], dim=-1)
        rows = pack_rows(values[None], self.quantizer.step, self.quantizer.mean, self.fields)[0]
        return with_gains(rows, gains) if gains.shape[-1] else rows

    def step(self, query: Tensor, kv_cache: Tensor, metadata: PagedMetadata) -> Tensor:
        """Return the outputs [B, H, ·] of queries [B, H, ·], whose tokens are written."""
        steps, rank, channels = metadata.steps, self.entry.kv_lora_rank, self.entry.format.channels
        rows = self._rows(kv_cache).view(torch.int16)
        blocks = kv_cache.view(len(kv_cache), -1)[:, self.layout.unpacked_of()].view(self.first_dtype)
        tokens = blocks.unflatten(1, (self.layout.page, -1))
        latent, rope_key, exact = tokens[..., :rank], tokens[..., rank:channels], None
        if self.entry.first_tokens:
            of_first, first = self._first()
            exact = first.index_select(0, of_first.steps.pages[:, 0].clamp(min=0))
        unpack_rows(
            rows,
            self.quantizer.step,
            self.quantizer.mean,
            latent,
            rope_key,
            fields=self.fields,
            lengths=steps.lengths,
            pages=steps.pages,
            rotation=self.rotation,
            exact=exact,
        )
        gain = rows[..., self.entry.format.row_bytes // 2 :].view(torch.float16)

        def attend(latent_query: Tensor) -> Tensor:
            latent_query = latent_query.to(latent.dtype)
            has_gains = gain.shape[-1] > 0
            return over_pages(latent_query, latent, rope_key, gain if has_gains else None, self.impl.scale, steps)

        return self.in_latents(query, attend)


def fields_of(entry: QuantizedLatentEntry) -> tuple[int, ...]:
    """The bit fields of a layer's rows, as kernels take them."""
    return tuple(chain.from_iterable(entry.format.fields()))
