"""Quantization token by token, for caches that drop single tokens, so that no two tokens may share a byte.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .quantization import BITS, PACKED, dequantize, grouped_channels, pack, quantize, token_groups, unpack


class TokenCodes:
    """Codec of tokens [B, H, n, d] to packed codes [B, H, n, ·] uint8, and scales and zero points [B, H, n, ·].

    Scales and zero points have the dtype of the tokens. All depend on their token alone, so results do not depend on
    how a text is chunked. Codes of adjacent channels share a byte.
    """

    def __init__(self, format: str, group: int) -> None:
        """Set `format` (int8, int4, int3, int2 or fp8) and `group`, the most channels that share a scale.

        Raises:
            ValueError: another format, or a group below 1.
        """
        if format not in BITS:
            raise ValueError(f"unknown format {format!r} of streaming heads; choose from {', '.join(BITS)}")
        if group < 1:
            raise ValueError(f"group of streaming heads must be at least 1, not {group}")
        self.format, self.group = format, group

    @classmethod
    def of(cls, kv_cache: dict[str, Any]) -> TokenCodes:
        """Read the format of streaming heads from the `kv_cache` of a config.json."""
        return cls(kv_cache.get("streaming_format", kv_cache["format"]), kv_cache["group"])

    def settings(self) -> tuple:
        """Return format and group."""
        return self.format, self.group

    def token_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of one quantized token of `width` channels of `dtype`."""
        codes, numbers = self.widths(width)
        return codes + numbers * dtype.itemsize

    def widths(self, width: int) -> tuple[int, int]:
        """Return the bytes of codes, and the number of scales and zero points, of a token of `width` channels."""
        packed, bits = PACKED[self.format], BITS[self.format]
        return -(-width // packed) * packed * bits // 8, token_groups(width, self.group) * (
            1 if self.format == "fp8" else 2
        )

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize tokens [B, H, n, d] to packed codes, uint8, and scales and zero points; see `widths`."""
        width = tokens.shape[-1]
        if not width:
            return tokens.to(torch.uint8), tokens
        codes, scale, zero = quantize(grouped_channels(tokens, self.group), self.format, -1)
        codes = codes.flatten(-2)[..., :width]
        if spare := -width % PACKED[self.format]:
            codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], spare)], dim=-1)
        numbers = scale if zero is None else torch.cat([scale, zero], dim=-2)
        # `pack` packs along the second last dimension.
        return pack(codes.mT, BITS[self.format]).mT, numbers.squeeze(-1)

    def decode(self, codes: Tensor, numbers: Tensor, width: int) -> Tensor:
        """Dequantize the result of `encode` to tokens [B, H, n, width], in the dtype of `numbers`."""
        if not width:
            return numbers
        codes = unpack(codes.mT, BITS[self.format]).mT[..., :width]
        scale, *zero = numbers.unsqueeze(-1).split(token_groups(width, self.group), dim=-2)
        tokens = dequantize(grouped_channels(codes, self.group), scale, zero[0] if zero else None)
        return tokens.flatten(-2)[..., :width]

    def read(self, tokens: Tensor) -> Tensor:
        """Quantize and dequantize tokens [B, H, n, d]."""
        return self.decode(*self.encode(tokens), tokens.shape[-1])
