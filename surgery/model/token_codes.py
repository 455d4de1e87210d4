"""Tokens quantized one at a time: for caches whose tokens leave one by one, where no two may share a byte.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .quantization import BITS, PACKED, dequantize, grouped_channels, pack, quantize, token_groups, unpack


class TokenCodes:
    """Tokens [B, H, n, d] ↔ bytes of codes [B, H, n, ·], and scales and zero points [B, H, n, ·] in the tokens' dtype.

    Both are functions of their token alone, so what is read does not depend on the pieces that a text comes in. Codes
    of neighboring channels share a byte.
    """

    def __init__(self, format: str, group: int) -> None:
        """`format` of a code: int8, int4, int3, int2 or fp8; `group`: channels that share a scale, at most.

        Raises:
            ValueError: another format, or a group below 1.
        """
        if format not in BITS:
            raise ValueError(f"streaming heads as {format!r}: {', '.join(BITS)} are possible")
        if group < 1:
            raise ValueError(f"streaming heads with groups of {group} channels: at least 1 is needed")
        self.format, self.group = format, group

    @classmethod
    def of(cls, kv_cache: dict[str, Any]) -> TokenCodes:
        """Read the format of streaming heads from the `kv_cache` of a config.json."""
        return cls(kv_cache.get("streaming_format", kv_cache["format"]), kv_cache["group"])

    def settings(self) -> tuple:
        """Format, group."""
        return self.format, self.group

    def token_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of one token of `width` channels whose numbers were of `dtype`."""
        codes, numbers = self.widths(width)
        return codes + numbers * dtype.itemsize

    def widths(self, width: int) -> tuple[int, int]:
        """Bytes of codes, and scales and zero points, of a token of `width` channels."""
        packed, bits = PACKED[self.format], BITS[self.format]
        return -(-width // packed) * packed * bits // 8, token_groups(width, self.group) * (
            1 if self.format == "fp8" else 2
        )

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, H, n, d] as codes, uint8, and numbers; see `widths`."""
        width = tokens.shape[-1]
        if not width:
            return tokens.to(torch.uint8), tokens
        codes, scale, zero = quantize(grouped_channels(tokens, self.group), self.format, -1)
        codes = codes.flatten(-2)[..., :width]
        if spare := -width % PACKED[self.format]:
            codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], spare)], dim=-1)
        numbers = scale if zero is None else torch.cat([scale, zero], dim=-2)
        # `pack` joins neighbors of the second last dimension.
        return pack(codes.mT, BITS[self.format]).mT, numbers.squeeze(-1)

    def decode(self, codes: Tensor, numbers: Tensor, width: int) -> Tensor:
        """The tokens [B, H, n, width] that `encode` made these of, in the dtype of `numbers`."""
        if not width:
            return numbers
        codes = unpack(codes.mT, BITS[self.format]).mT[..., :width]
        scale, *zero = numbers.unsqueeze(-1).split(token_groups(width, self.group), dim=-2)
        tokens = dequantize(grouped_channels(codes, self.group), scale, zero[0] if zero else None)
        return tokens.flatten(-2)[..., :width]

    def read(self, tokens: Tensor) -> Tensor:
        """Tokens [B, H, n, d] as they are read once they were codes."""
        return self.decode(*self.encode(tokens), tokens.shape[-1])
