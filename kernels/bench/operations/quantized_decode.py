"""Cases of `mla_decode_quantized` and `gqa_decode_quantized`: the same attentions over caches of a few bits.

Keys and latents share scales by channel, values and rotated keys by token, as KIVI stores them (arXiv:2402.02750).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench.case import Case, DecodeCase, Inputs, Place, generator
from surgery.kernels.bench.case import random as normal
from surgery.kernels.gqa_decode_quantized.operator import gqa_decode_quantized
from surgery.kernels.mla_decode.quantized_operator import mla_decode_quantized

BITS = {"int8": 8, "int4": 4, "fp8": 8}
SPAN = 12.0**0.5
"""Width of a uniform distribution of variance 1."""
GROUP = 32
"""Tokens of a channel, or channels of a token, that share a scale; what is quantized is whole groups."""


def whole_groups(place: Place) -> Iterator[tuple[Place, str]]:
    """The place with the tokens of its whole groups, by format; nothing where there is none."""
    whole = {**place, "context": place["context"] // GROUP * GROUP}
    return ((whole, format) for format in BITS if whole["context"])


@dataclass(frozen=True)
class QuantizedDecode(DecodeCase):
    """Quantized values in a `format`, `group` tokens of a channel or channels of a token to a scale."""

    format: str
    group: int

    def _side_bytes(self, by_channel: int, by_token: int) -> int:
        """Bytes of quantized values and scales of all tokens, for so many elements of a token quantized either way."""
        codes = self.context * BITS[self.format] // 8 * (by_channel + by_token)
        scales = self.context // self.group * by_channel + self.context * -(-by_token // self.group)
        numbers = 1 if self.format == "fp8" else 2
        return self.batch * (codes + numbers * scales * self.dtype.itemsize)

    def _quantized(
        self, rng: torch.Generator, name: str, width: int, heads: tuple[int, ...], by_channel: bool
    ) -> Inputs:
        """Random quantized values [B, *heads, S·bits/8, width], their scales and zeros, of numbers of variance 1."""
        bits, tokens = BITS[self.format], (self.batch, *heads)
        count = (self.context // self.group, width) if by_channel else (self.context, -(-width // self.group))
        if self.format == "fp8":
            codes = normal(rng, torch.float32, *tokens, self.context, width).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = 1.0 + 0.1 * normal(rng, self.dtype, *tokens, *count)
            return {f"{name}_codes": codes, f"{name}_scale": scales}
        codes = torch.randint(
            0, 256, (*tokens, self.context * bits // 8, width), dtype=torch.uint8, device=rng.device, generator=rng
        )
        step = SPAN / (2**bits - 1) * (1.0 + 0.1 * normal(rng, self.dtype, *tokens, *count))
        return {f"{name}_codes": codes, f"{name}_scale": step, f"{name}_zero": -step * (2 ** (bits - 1) - 0.5)}


@dataclass(frozen=True)
class MLADecodeQuantized(QuantizedDecode):
    """A latent of `rank` numbers and `rope` rotated ones."""

    rank: int
    rope: int

    operation: ClassVar[str] = "mla_decode_quantized"

    @classmethod
    def at(cls, place: Place) -> Iterator[Case]:
        sizes = ((48, 16),) if place["model"] == "tiny" else ((512, 64), (256, 64))
        for whole, format in whole_groups(place):
            yield from (cls(**whole, format=format, group=GROUP, rank=rank, rope=rope) for rank, rope in sizes)

    @property
    def variant(self) -> str:
        return f"{self.rank}+{self.rope} {self.format}"

    @property
    def cache_bytes(self) -> int:
        return self._side_bytes(self.rank, self.rope)

    @property
    def query_bytes(self) -> int:
        return self.batch * self.shape.heads * (2 * self.rank + self.rope) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.context * self.shape.heads * (2 * self.rank + self.rope)

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng = generator(device, seed)
        return {
            "query": normal(rng, self.dtype, self.batch, 1, self.shape.heads, self.rank + self.rope),
            **self._quantized(rng, "latent", self.rank, (), by_channel=True),
            **self._quantized(rng, "rope", self.rope, (), by_channel=False),
        }

    def run(self, inputs: Inputs) -> Tensor:
        parts = [inputs.get(f"{name}_{kind}") for name in ("latent", "rope") for kind in ("codes", "scale", "zero")]
        scale = (self.shape.head_dim + self.rope) ** -0.5
        settings = {"format": self.format, "group": self.group, "by_channel": True}
        return mla_decode_quantized(inputs["query"], *parts, scale, **settings)[0]


@dataclass(frozen=True)
class GQADecodeQuantized(QuantizedDecode):
    """Grouped keys and values."""

    operation: ClassVar[str] = "gqa_decode_quantized"

    @classmethod
    def at(cls, place: Place) -> Iterator[Case]:
        return (cls(**whole, format=format, group=GROUP) for whole, format in whole_groups(place))

    @property
    def variant(self) -> str:
        return f"{self.shape.heads}/{self.shape.kv_heads}x{self.shape.head_dim} {self.format}"

    @property
    def cache_bytes(self) -> int:
        return self.shape.kv_heads * self._side_bytes(self.shape.head_dim, self.shape.head_dim)

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.context * self.shape.heads * self.shape.head_dim

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng, shape = generator(device, seed), self.shape
        return {
            "query": normal(rng, self.dtype, self.batch, 1, shape.heads, shape.head_dim),
            **self._quantized(rng, "key", shape.head_dim, (shape.kv_heads,), by_channel=True),
            **self._quantized(rng, "value", shape.head_dim, (shape.kv_heads,), by_channel=False),
        }

    def run(self, inputs: Inputs) -> Tensor:
        parts = [inputs.get(f"{name}_{kind}") for name in ("key", "value") for kind in ("codes", "scale", "zero")]
        settings = {"format": self.format, "group": self.group, "keys": "channel"}
        return gqa_decode_quantized(inputs["query"], *parts, self.scale, **settings)[0]
