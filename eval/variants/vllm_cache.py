"""Emulation of vLLM's fp8 cache and its formats with one scale per token and head.

`fp8` casts to e4m3 with scale 1, vLLM's default for checkpoints without scales. `int8_per_token_head` and
`fp8_per_token_head` have an fp32 scale per token and head; `int4_per_token_head` (vLLM #40835) rotates by random signs
and a Hadamard matrix (QuaRot, arXiv:2404.00456) and stores a zero point in the four lowest bits of the scale.
Arithmetic as in vLLM 0.32, `v1/attention/ops/int4_per_token_head.py` and `triton_reshape_and_cache_flash.py`;
`tests/engines/test_vllm_formats.py` compares with them.

Not emulated: fp8 queries of backends that multiply in fp8, and the bf16 rotation of vLLM's GPU kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.eval.variants.coded_cache import Coder, Parts, packed, rotated, unpacked
from surgery.model.quantization import FLOAT8, FLOAT8_MAX

LEAST_SCALE = 1e-6
SIGNS_SEED = 0x9E3779B9
"""vLLM's seed of the random signs that precede the Hadamard rotation."""


def as_fp8(values: Tensor) -> Tensor:
    """Cast to e4m3, saturating, and return the bytes as uint8."""
    return values.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).view(torch.uint8)


def of_fp8(stored: Tensor) -> Tensor:
    """Convert e4m3 bytes of `as_fp8` to float32."""
    return stored.contiguous().view(FLOAT8).float()


class Fp8(Coder):
    """Cast to e4m3 without a scale."""

    def encode(self, tokens: Tensor) -> Parts:
        return (as_fp8(tokens.float()),)

    def decode(self, parts: Parts) -> Tensor:
        return of_fp8(parts[0])


class PerTokenHead(Coder):
    """Symmetric int8 or fp8 quantization with a scale per token and head."""

    def __init__(self, format: str) -> None:
        self.format = format

    def encode(self, tokens: Tensor) -> Parts:
        tokens = tokens.float()
        max_code = FLOAT8_MAX if self.format == "fp8" else 127
        scale = (tokens.abs().amax(-1, keepdim=True) / max_code).clamp(min=LEAST_SCALE)
        values = tokens * (1 / scale)
        return (as_fp8(values) if self.format == "fp8" else _round(values).clamp(-128, 127).to(torch.int8)), scale

    def decode(self, parts: Parts) -> Tensor:
        values, scale = parts
        return (of_fp8(values) if self.format == "fp8" else values.float()) * scale


class Int4PerTokenHead(Coder):
    """Asymmetric 4-bit quantization after a rotation; d / 2 + 4 bytes per token and head."""

    def encode(self, tokens: Tensor) -> Parts:
        width = tokens.shape[-1]
        block = width & -width
        signs = _signs(block).to(tokens.device).repeat(width // block)
        values = (rotated(tokens * signs, block) * block**0.5).to(tokens.dtype).float()
        least, greatest = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        scale = ((greatest - least) / 15).clamp(min=LEAST_SCALE)
        zero = _round(-least / scale).clamp(0, 15)
        codes = _round(values * (1 / scale) + zero).clamp(0, 15)
        bits = (scale.view(torch.int32) & -16) | zero.int()
        return packed(codes, 4), bits.view(torch.float32)

    def decode(self, parts: Parts) -> Tensor:
        codes, bits = unpacked(parts[0], 4), parts[1].view(torch.int32)
        values = (codes - (bits & 15)) * (bits & -16).view(torch.float32)
        width = values.shape[-1]
        block = width & -width
        return rotated(values, block) / block**0.5 * _signs(block).to(values.device).repeat(width // block)


def _round(values: Tensor) -> Tensor:
    """Round to the nearest integer, ties away from zero."""
    return (values + torch.where(values >= 0, 0.5, -0.5)).trunc()


def _signs(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(SIGNS_SEED)
    return 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1
