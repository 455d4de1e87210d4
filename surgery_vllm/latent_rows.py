"""Quantized MLA with decode kernels: rows are unpacked into the scratch end of their blocks, one layer at a time.

`mla_decode_packed` would unpack into scratch memory for the longest possible requests, reserved for CUDA graphs. The
blocks have memory for exactly the cached tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config

from surgery.kernels.lowrank_decode.reference import rotation_tables
from surgery.kernels.mla_decode.packed_operator import mla_decode_packed, within_lanes
from surgery.kernels.pack_rows.operator import pack_rows
from surgery.kernels.unpack_rows.operator import unpack_rows
from surgery.model.layer_entry import LayerEntry
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery.model.token_quantizer import TokenQuantizer, with_gains
from surgery_vllm.backend import PagedMetadata
from surgery_vllm.rows import RowCache, fields_of
from surgery_vllm.spans import Span
from surgery_vllm.steps import logged, over_pages, refusal_of_kernels


class LatentRows(RowCache):
    """Packed rows of an MLA layer.

    Args:
        in_latents: computes outputs [T, H, ·] of the layer's queries by an attention function in latent space, which
            maps [T, H, v + ρ] to [T, H, v], of v elements from which values are read.
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
        vllm_config = get_current_vllm_config()
        self.in_cpp = self.has_cpp()
        if self.layout.unpacked or self.in_cpp:
            positions = vllm_config.model_config.max_model_len
            self.rotation = rotation_tables(inv_freq, positions) if len(inv_freq) else None

    def refusal_of(self, layers: Sequence[LayerEntry], vllm_config: VllmConfig) -> str | None:
        """Return why no kernel runs the steps of a model's layers; None if one does."""
        if not all(isinstance(entry, QuantizedLatentEntry) for entry in layers):
            return "low rank in bits"
        reasons = [within_lanes(fields_of(entry)) for entry in layers]
        reasons.append(refusal_of_kernels(torch.get_default_dtype(), torch.device(vllm_config.device_config.device)))
        return logged(next(filter(None, reasons), None))

    def refusal(self) -> str | None:
        """Return why no kernel runs the steps of this loaded layer; None if one does."""
        pairs = self.quantizer.step[self.entry.kv_lora_rank :].view(-1, 2)
        return None if torch.equal(pairs[:, 0], pairs[:, 1]) else "rotary pairs with two quantization steps"

    def pack(self, vectors: Tensor) -> Tensor:
        """Pack values and gains [T, r + ρ + G] into rows [T, bytes], by a kernel if steps run in one."""
        if not (self.layout.unpacked or self.in_cpp):
            return super().pack(vectors)
        values, gains = vectors.tensor_split([self.entry.format.channels], dim=-1)
        values = self.quantizer.corrected(values)
        rows = pack_rows(values[None], self.quantizer.step, self.quantizer.mean, self.fields)[0]
        return with_gains(rows, gains) if gains.shape[-1] else rows

    def over_rows(self, query: Tensor, kv_cache: Tensor, span: Span, of_first: Span) -> Tensor:
        return self.in_latents(query, partial(self._over_rows, kv_cache, span, of_first))

    def _over_rows(self, kv_cache: Tensor, span: Span, of_first: Span, query: Tensor) -> Tensor:
        """Compute outputs [B·T, H, v] of rotated queries [B·T, H, v + ρ] over the packed rows of their requests."""
        pages, lengths = span.table()
        out, _ = mla_decode_packed(
            query.unflatten(0, (len(pages), -1)),
            self._rows(kv_cache).view(torch.int16),
            self.quantizer.step,
            self.quantizer.mean,
            self.impl.scale,
            fields=self.fields,
            rank=self.entry.kv_lora_rank,
            rotation=self.rotation,
            exact=self._exact(of_first.pages).to(query.dtype) if self.entry.first_tokens else None,
            lengths=lengths,
            pages=pages,
        )
        return out.flatten(0, 1)

    def step(self, query: Tensor, kv_cache: Tensor, metadata: PagedMetadata) -> Tensor:
        """Compute outputs [B, H, ·] of queries [B, H, ·], whose tokens are in the cache already."""
        steps, width = metadata.steps, self.entry.value_width
        rows = self._rows(kv_cache).view(torch.int16)
        blocks = kv_cache.view(len(kv_cache), -1)[:, self.layout.unpacked_of()].view(self.first_dtype)
        tokens = blocks.unflatten(1, (self.layout.page, -1))
        latent, rope_key, exact = tokens[..., :width], tokens[..., width : width + self.entry.rope_dim], None
        if self.entry.first_tokens:
            exact = self._exact(self._first()[0].steps.pages)
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
        gains = rows[..., self.entry.format.row_bytes // 2 :].view(torch.float16)

        def attend(latent_query: Tensor) -> Tensor:
            return over_pages(latent_query.to(latent.dtype), latent, rope_key, gains, self.impl.scale, steps)

        return self.in_latents(query, attend)
