"""llama.cpp's q8_0, q5_0 and q4_0 caches, rotated since #21038 (`-ctk q4_0 -ctv q4_0`).

32 channels share a scale in fp16: 8.5, 5.5 and 4.5 bits a value. Heads of a multiple of 64 channels are rotated by a
Hadamard matrix first, keys by the largest power of two that divides a head and values by 64
(`llama_kv_cache::build_input_k_rot`, `build_input_v_rot`); others are not. Arithmetic as in ggml's
`quantize_row_q8_0`, `_q5_0` and `_q4_0`; `tests/engines/test_llama_cpp.py` compares the perplexity.

Left out: llama.cpp's attention on a CPU also quantizes queries to q8_0 before it multiplies them by such keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from surgery.eval.variants.coded_cache import CodedLayer, Coder, Parts, packed, rotated, unpacked

BLOCK = 32
LEAST_ROTATION = 64
INTERLEAVED = ("llama", "mistral", "mixtral")
"""Model types whose keys GGUF files permute."""

BITS = {"q8_0": 8, "q5_0": 5, "q4_0": 4}


class GgmlBlocks(Coder):
    """Blocks of 32 channels."""

    def __init__(self, format: str, *, values: bool, interleaved: bool = False) -> None:
        """`interleaved`: the channels that RoPE turns together stand side by side, see `INTERLEAVED`."""
        self.bits, self.values, self.interleaved = BITS[format], values, interleaved

    def rotation(self, width: int) -> int:
        """Channels that are rotated together; 1 for none."""
        if width % LEAST_ROTATION:
            return 1
        return LEAST_ROTATION if self.values else width & -width

    def encode(self, tokens: Tensor) -> Parts:
        if tokens.shape[-1] % BLOCK:
            raise ValueError(f"heads of {tokens.shape[-1]} channels: llama.cpp quantizes multiples of {BLOCK}")
        if self.interleaved:
            tokens = tokens.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        blocks = rotated(tokens, self.rotation(tokens.shape[-1])).unflatten(-1, (-1, BLOCK))
        if self.bits == 8:
            scale = blocks.abs().amax(-1, keepdim=True) / 127
            codes = (blocks * _inverse(scale)).round().to(torch.int8)
            return codes, scale.half()
        half = 2 ** (self.bits - 1)
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # with its sign, which gets the code 0
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
    """The layers of a cache of this type for keys and for values."""
    keys = GgmlBlocks(format, values=False, interleaved=config.model_type in INTERLEAVED)
    values = GgmlBlocks(format, values=True)
    return [CodedLayer(keys, values) for _ in range(config.num_hidden_layers)]


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)
