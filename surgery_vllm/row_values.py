"""Packing and dequantization of token rows, in plain PyTorch.

Formulas: ``surgery/model/quantized_latent_attention.py`` and ``quantized_low_rank_attention.py``. Shapes: T new tokens,
B requests, S tokens of the longest, r rank of the latent, ρ width of the shared key (0 in low rank), G gains of a token
(MLA with q/k-norm).

Values are read in fp32, whatever the model's dtype: dequantization is in fp32, and CPUs without bfloat16 multiply
fastest in it.
"""

import torch
from torch import Tensor

from surgery.model.token_quantizer import TokenQuantizer, gains_in, with_gains
from surgery_vllm.paged import read_slots


def rows_of(vectors: Tensor, quantizer: TokenQuantizer) -> Tensor:
    """Pack values and gains [T, r + ρ + G] into rows [T, bytes] uint8; gains are fp16."""
    values, gains = vectors.tensor_split([quantizer.format.channels], dim=-1)
    rows = quantizer.encode(values)
    return with_gains(rows, gains) if gains.shape[-1] else rows


def vectors_of(
    rows: Tensor, quantizer: TokenQuantizer, inv_freq: Tensor | None, first: Tensor | None, lens: Tensor
) -> Tensor:
    """Dequantize rows [B, S, bytes] of the first S tokens of requests to [B, S, v + ρ + G] fp32, with rotated keys.

    Values are read from the first v elements: the latent, and the key before its rotation if it predicts values.

    Args:
        rows: packed rows, arbitrary after the end of a request.
        quantizer: quantizer of the layer.
        inv_freq: [ρ/2] inverse frequencies of the shared key, fp32; None without a shared key.
        first: [B, first, r + ρ] first tokens in full precision, which replace their rows; arbitrary after the end of a
            request.
        lens: [B] tokens of every request.
    """
    packed = quantizer.format.row_bytes
    values = quantizer.decode(rows[..., :packed], torch.float32)
    if first is not None:
        head = values[:, : first.shape[1]]
        has_come = torch.arange(head.shape[1], device=rows.device) < lens[:, None]
        head.copy_(torch.where(has_come[..., None], first[:, : head.shape[1]].float(), head))
    if quantizer.correcting:
        values = torch.cat((values, values[..., quantizer.correcting :]), dim=-1)
    if inv_freq is not None:
        rotate(values[..., values.shape[-1] - 2 * len(inv_freq) :], inv_freq)
    if rows.shape[-1] == packed:
        return values
    return torch.cat((values, gains_in(rows, packed).float()), dim=-1)


def values_at(
    slots: Tensor, rows: Tensor, quantizer: TokenQuantizer, first_slots: Tensor | None, first: Tensor | None
) -> Tensor:
    """Dequantize tokens at slots [T], like `vectors_of`, to values [T, r] fp32; arbitrary for padding.

    Args:
        rows: [pages, tokens of a page, bytes].
        first_slots: slots [T] in `first`; those of later tokens are negative, or in vLLM's null block 0.
        first: [pages, first, r] first tokens in full precision, or None.
    """
    values = quantizer.decode(read_slots(rows, slots), torch.float32)
    if first is None:
        return values
    is_first = first_slots >= first.shape[1]
    return torch.where(is_first[:, None], read_slots(first, first_slots).float(), values)


def rotate(keys: Tensor, inv_freq: Tensor) -> None:
    """Rotate shared keys [B, S, ρ], fp32, in place to positions 0 to S - 1; adjacent elements are pairs."""
    angles = torch.arange(keys.shape[1], device=keys.device)[:, None] * inv_freq
    pairs = torch.view_as_complex(keys.unflatten(-1, (len(inv_freq), 2)))
    pairs.mul_(torch.polar(torch.ones_like(angles), angles))


def first_slots(slots: Tensor, page: int, count: int) -> Tensor:
    """Convert slots [T] in pages of `page` tokens to slots in pages of `count` first tokens; -1 for later tokens."""
    offset = slots % page
    return torch.where(offset < count, slots.div(page, rounding_mode="floor") * count + offset, -1)
