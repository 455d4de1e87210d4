"""Emulation of llama.cpp's q8_0, q5_0 and q4_0 caches, with the rotation of #21038 (`-ctk q4_0 -ctv q4_0`).

32 channels share an fp16 scale: 8.5, 5.5 and 4.5 bits per element. Heads of a multiple of 64 channels are first
rotated by a Hadamard matrix: keys in blocks of the largest power of two that divides the head size, values in blocks
of 64 (`llama_kv_cache::build_input_k_rot`, `build_input_v_rot`). Arithmetic as in ggml's `quantize_row_q8_0`, `_q5_0`
and `_q4_0`; `tests/engines/test_llama_cpp.py` compares the perplexity.

Not emulated: llama.cpp's attention on CPUs also quantizes queries to q8_0 before multiplying them with such keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from surgery.eval.variants.coded_cache import CodedLayer, Coder, Parts, packed, rotated, unpacked

BLOCK = 32
LEAST_ROTATION = 64
INTERLEAVED = ("llama", "mistral", "mixtral")
"""Model types for which GGUF conversion permutes the key channels."""

BITS = {"q8_0": 8, "q5_0": 5, "q4_0": 4}


class GgmlBlocks(Coder):
    """Quantization of blocks of 32 channels with an fp16 scale."""

    def __init__(self, format: str, *, values: bool, interleaved: bool = False) -> None:
        """Create a coder; `interleaved`: the two channels of a RoPE pair are adjacent, see `INTERLEAVED`."""
        self.bits, self.values, self.interleaved = BITS[format], values, interleaved

    def rotation(self, width: int) -> int:
        """Return the block size of the Hadamard rotation for heads of `width` channels; 1 for no rotation."""
        if width % LEAST_ROTATION:
            return 1
        return LEAST_ROTATION if self.values else width & -width

    def encode(self, tokens: Tensor) -> Parts:
        if tokens.shape[-1] % BLOCK:
            raise ValueError(f"head size {tokens.shape[-1]} is not supported; llama.cpp quantizes multiples of {BLOCK}")
        if self.interleaved:
            tokens = tokens.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        blocks = rotated(tokens, self.rotation(tokens.shape[-1])).unflatten(-1, (-1, BLOCK))
        if self.bits == 8:
            scale = blocks.abs().amax(-1, keepdim=True) / 127
            codes = (blocks * _inverse(scale)).round().to(torch.int8)
            return codes, scale.half()
        half = 2 ** (self.bits - 1)
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # signed; its code is 0
        scale = largest / -half
        codes = (blocks * _inverse(scale) + (half + 0.5)).trunc().clamp(max=2 * half - 1).to(torch.uint8)
        high = (packed(codes >> 4, 1),) if self.bits == 5 else ()
        return packed(codes & 15, 4), scale.half(), *high

    def decode(self, parts: Parts) -> Tensor:
        if self.bits == 8:
            values = parts[0].float() * parts[1].float()
        else:
            codes = unpacked(parts[0], 4) + (16 * unpacked(parts[2], 1) if self.bits == 5 else 0)
            values = (codes - 2 ** (self.bits - 1)) * parts[1].float()
        values = values.flatten(-2)
        values = rotated(values, self.rotation(values.shape[-1]))
        return values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else values


def llama_cpp_layers(format: str, config: PreTrainedConfig) -> list[CodedLayer]:
    """Return cache layers with this type for keys and values."""
    keys = GgmlBlocks(format, values=False, interleaved=config.model_type in INTERLEAVED)
    values = GgmlBlocks(format, values=True)
    return [CodedLayer(keys, values) for _ in range(config.num_hidden_layers)]


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)
