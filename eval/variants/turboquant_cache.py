"""Emulation of vLLM's TurboQuant presets (`--kv-cache-dtype turboquant_…`).

Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", arXiv:2504.19874, as
implemented in vLLM 0.32 (`model_executor/layers/quantization/turboquant`): keys are divided by their norm, rotated by
a Hadamard matrix and rounded to the Lloyd-Max centroids of N(0, 1/d), with the norm in fp16; the presets ending in
`nc` rescale the rounded vector to norm 1. Values are quantized uniformly, with scale and zero point in fp16 per token
and head. `k8v4` has fp8 keys. The first two and the last two layers stay in full precision.

Not emulated: the paper's second stage (QJL), which vLLM omits too; and that in vLLM a prompt attends to its own
unquantized keys.
`tests/engines/test_vllm_formats.py` compares with vLLM's kernels.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from surgery.eval.variants.coded_cache import CodedLayer, Coder, Exact, Parts, packed, rotated, unpacked
from surgery.eval.variants.vllm_cache import Fp8

PRESETS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Bits of keys and values; 8 means fp8."""

BOUNDARY = 2
"""Number of first and of last layers that vLLM keeps in full precision."""

LLOYD_STEPS, TRAPEZOIDS = 200, 200


class LloydMaxKeys(Coder):
    """Lloyd-Max quantization of the rotated, normalized keys, with norms in fp16."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, tokens: Tensor) -> Parts:
        width = tokens.shape[-1]
        norms = tokens.float().norm(dim=-1, keepdim=True)
        directions = rotated(tokens.float() / (norms + 1e-8), width)
        levels = lloyd_max(width, self.bits).to(tokens.device)
        codes = torch.bucketize(directions, (levels[1:] + levels[:-1]) / 2, right=True)
        return packed(codes, self.bits), norms.half()

    def decode(self, parts: Parts) -> Tensor:
        codes, norms = unpacked(parts[0], self.bits).long(), parts[1].float()
        directions = lloyd_max(codes.shape[-1], self.bits).to(norms.device)[codes]
        directions = directions / (directions.square().sum(-1, keepdim=True) + 1e-16).sqrt()
        return rotated(norms * directions, codes.shape[-1])


class EvenValues(Coder):
    """Uniform quantization between the minimum and maximum per token and head, with fp16 scale and minimum."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, tokens: Tensor) -> Parts:
        tokens = tokens.float()
        least, max_code = tokens.amin(-1, keepdim=True), 2**self.bits - 1
        scale = ((tokens.amax(-1, keepdim=True) - least) / max_code).clamp(min=1e-8)
        codes = ((tokens - least) / scale + 0.5).trunc().clamp(0, max_code)
        return packed(codes, self.bits), scale.half(), least.half()

    def decode(self, parts: Parts) -> Tensor:
        return unpacked(parts[0], self.bits) * parts[1].float() + parts[2].float()


def turboquant_layers(preset: str, config: PreTrainedConfig) -> list[CodedLayer]:
    """Return the cache layers of one of the `PRESETS`."""
    key_bits, value_bits = PRESETS[preset]
    layers = config.num_hidden_layers
    ends = min(BOUNDARY, layers // 2)
    keys, values = Fp8() if key_bits == 8 else LloydMaxKeys(key_bits), EvenValues(value_bits)
    inner = range(ends, layers - ends)
    return [CodedLayer(keys, values) if index in inner else CodedLayer(EXACT, EXACT) for index in range(layers)]


EXACT = Exact()


@lru_cache
def lloyd_max(width: int, bits: int) -> Tensor:
    """Compute the Lloyd-Max centroids [2^bits] of N(0, 1/width), ascending, by Lloyd's iteration from a uniform grid.

    Conditional means use the trapezoidal rule as in vLLM: its error of 1e-4 affects codes at the edges of intervals.
    """
    count = 2**bits
    levels = 3.5 * ((2 * torch.arange(count, dtype=torch.float64) + 1) / count - 1)
    far = torch.full((1,), 10.5, dtype=torch.float64)
    for _ in range(LLOYD_STEPS):
        edges = torch.cat([-far, (levels[1:] + levels[:-1]) / 2, far])
        steps = torch.linspace(0, 1, TRAPEZOIDS + 1, dtype=torch.float64)
        points = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * steps
        density = torch.exp(-points.square() / 2)
        density[:, [0, -1]] /= 2
        levels = (points * density).sum(1) / density.sum(1)
    return (levels / math.sqrt(width)).float()
