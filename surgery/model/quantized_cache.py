"""KV cache quantized to 8, 4, 3 or 2 bits, keys per channel and values per token, as in KIVI.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750. Keys have a few channels
that are large in every token, so the elements of one channel share a scale. Values have no such channels, so the
elements of one token do. Latents are stored as keys and quantized per channel too, unless `keys` is "token".

Tokens are quantized `group` at a time, once a full group is older than the residual window. The forward pass that
completes a group already reads it quantized. A plain forward pass over a whole text therefore reads all but the last
tokens quantized, at every position, while decoding has the most recent ones in full precision. It also makes the scale
of a channel depend on later tokens of the same group. Its loss is close to that of decoding, not equal: evaluate a
quantized cache by decoding through it.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cache_layer import CompactLayer
from .growing import append, refill
from .quantization import BITS, PACKED, dequantize, grouped_channels, pack, quantize, token_groups, unpack

EXACT = "exact"
"""Format of unquantized values."""

Spans = Sequence[tuple[str, int]]
"""Pairs of a format and a number of adjacent channels."""

KEYS = ("channel", "token")
"""Quantization of keys: per channel, over the tokens of a group; or per token, over the channels of a group."""


class QuantizedKVLayer(CompactLayer):
    """Quantized cache layer: the oldest tokens quantized, fewer than `window + group` recent ones in full precision.

    Keys and values may differ in their last dimension, as the latent and the rotated key of stock `deepseek_v3` do;
    that of the values may be 0.
    """

    form = "a quantized KV cache"
    reads_ahead = True

    def __init__(
        self,
        format: str,
        group: int = 32,
        window: int = 0,
        keys: str = "channel",
        sinks: int = 0,
        value_format: str | None = None,
        spans: Spans = (),
        clip: bool = False,
    ) -> None:
        """
        Args:
            format: int8, int4, int3, int2 or fp8 (e4m3).
            group: tokens that share a scale in a channel of the keys, and channels that share one in a token of the
                values. A head size that is no multiple is split into the fewest nearly equal groups of at most `group`.
            window: least number of recent tokens in full precision. KIVI keeps 128.
            keys: "channel", or "token" to quantize keys like values.
            sinks: first tokens that stay in full precision.
            value_format: format of the values if it differs, or "exact" for full precision.
            spans: (format, channels) of consecutive channels of the keys; empty if all have `format`.
            clip: narrow the range of each group of keys to the least squared error.

        Raises:
            ValueError: an unknown format, a negative window or number of sinks, or a group whose codes do not fill
                whole bytes.
        """
        super().__init__()
        formats = [format, *([] if value_format in (None, EXACT) else [value_format]), *(each for each, _ in spans)]
        for each in formats:
            if each not in BITS:
                raise ValueError(f"unknown format {each!r} of a quantized KV cache; choose from {', '.join(BITS)}")
            if group < 1 or group % PACKED[each] or window < 0 or sinks < 0:
                raise ValueError(
                    f"KV cache of {each} with group {group}, window {window} and sinks {sinks}: group must be a "
                    f"positive multiple of {PACKED[each]}, window and sinks at least 0"
                )
        if keys not in KEYS:
            raise ValueError(f"unknown keys {keys!r} of a quantized KV cache; choose {' or '.join(KEYS)}")
        self.format, self.group, self.window, self.keys_by = format, group, window, keys
        self.sinks, self.value_format = sinks, value_format or format
        self.spans, self.clip = tuple((each, channels) for each, channels in spans), clip

    def settings(self) -> tuple:
        """Return the arguments of the constructor."""
        whole = self.format, self.group, self.window, self.keys_by, self.sinks
        return *whole, self.value_format, self.spans, self.clip

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
        quantized = self._quantized(tokens)

        def bytes_of(format: str, width: int, by_channel: bool) -> int:
            if format == EXACT:
                return quantized * width * dtype.itemsize
            groups = quantized // self.group * width if by_channel else quantized * token_groups(width, self.group)
            numbers = 1 if format == "fp8" else 2
            return quantized * BITS[format] // 8 * width + numbers * groups * dtype.itemsize

        keys = self.spans or ((self.format, key_dim),)
        codes = sum(bytes_of(each, width, self.keys_by == "channel") for each, width in keys)
        codes += bytes_of(self.value_format, value_dim, by_channel=False)
        return batch * heads * (codes + (tokens - quantized) * (key_dim + value_dim) * dtype.itemsize)

    def _quantized(self, tokens: int) -> int:
        return max(0, tokens - min(self.sinks, tokens) - self.window) // self.group * self.group

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, heads, head sizes, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :].clone(), value_states[..., :0, :].clone()
        self.first_keys, self.first_values = self.keys.clone(), self.values.clone()
        options = {
            "by_channel": self.keys_by == "channel",
            "clip": self.clip,
            "reserved": self._quantized(self.reserved),
        }
        if self.spans:
            self.key_codes = SpannedCodes(self.keys, self.spans, self.group, **options)
        else:
            self.key_codes = GroupedCodes(self.keys, self.format, self.group, **options)
        if self.value_format == EXACT:
            self.value_codes = ExactTokens(self.values, reserved=self._quantized(self.reserved))
        else:
            value_options = {"by_channel": False, "reserved": options["reserved"]}
            self.value_codes = GroupedCodes(self.values, self.value_format, self.group, **value_options)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, n, d]; return all tokens [B, H, T, d], dequantized to the original dtype."""
        self.append(key_states, value_states)
        return (
            torch.cat([self.first_keys, self.key_codes.dequantized(), self.keys], dim=-2),
            torch.cat([self.first_values, self.value_codes.dequantized(), self.values], dim=-2),
        )

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append keys and values [B, H, n, d] without dequantizing."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if missing := self.sinks - self.first_keys.shape[-2]:
            self.first_keys = append(self.first_keys, key_states[..., :missing, :], max_size=self.sinks)
            self.first_values = append(self.first_values, value_states[..., :missing, :], max_size=self.sinks)
            key_states, value_states = key_states[..., missing:, :], value_states[..., missing:, :]
        complete = max(0, self.keys.shape[-2] + key_states.shape[-2] - self.window) // self.group * self.group
        max_tokens = self.window + self.group - 1
        if not complete:
            self.keys = append(self.keys, key_states, max_size=max_tokens)
            self.values = append(self.values, value_states, max_size=max_tokens)
            return
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.key_codes.append(keys[..., :complete, :])
        self.value_codes.append(values[..., :complete, :])
        self.keys = refill(self.keys, keys[..., complete:, :], max_size=max_tokens)
        self.values = refill(self.values, values[..., complete:, :], max_size=max_tokens)

    def get_seq_length(self) -> int:
        """Return the number of tokens, quantized or not."""
        if not self.is_initialized:
            return 0
        return self.first_keys.shape[-2] + self.key_codes.tokens + self.keys.shape[-2]

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = self.first_keys = self.first_values = self.key_codes = self.value_codes = None
        self.is_initialized = False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.first_keys, self.first_values = change(self.first_keys), change(self.first_values)
            self.key_codes.map_rows(change)
            self.value_codes.map_rows(change)


class GroupedCodes:
    """Quantized tokens [B, H, T, d]: packed codes, and a scale and a zero point (integer formats) per group.

    Attributes:
        codes: [B, H, T·bits/8, d] uint8; consecutive tokens share a byte, the first in the lowest bits.
        scale, zero: per channel [B, H, T/group, d], or per token [B, H, T, groups of d]; in the dtype of the tokens.
            fp8 has no zero.
    """

    def __init__(
        self, like: Tensor, format: str, group: int, *, by_channel: bool, clip: bool = False, reserved: int = 0
    ) -> None:
        """Make an empty container; batch size, heads, d, dtype and device are those of `like` [B, H, any, d].

        `reserved`: tokens to allocate memory for at once.
        """
        self.format, self.bits, self.group, self.by_channel = format, BITS[format], group, by_channel
        self.clip, self.reserved = clip, reserved
        groups = like.shape[-1] if by_channel else token_groups(like.shape[-1], group)
        self.codes = like.new_empty((*like.shape[:-2], 0, like.shape[-1]), dtype=torch.uint8)
        self.scale = like.new_empty((*like.shape[:-2], 0, groups))
        self.zero = None if format == "fp8" else self.scale.clone()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.codes.shape[-2] * 8 // self.bits

    def append(self, tokens: Tensor) -> None:
        """Quantize and append tokens [B, H, n, d]; n is a multiple of the group."""
        grouped, along = self._grouped(tokens)
        codes, scale, zero = quantize(grouped, self.format, along, clip=self.clip)
        codes = codes.flatten(along - 1, along)[..., : tokens.shape[-1]]
        scales = self.reserved // self.group if self.by_channel else self.reserved
        self.codes = append(self.codes, pack(codes, self.bits), capacity=self.reserved * self.bits // 8)
        self.scale = append(self.scale, scale.squeeze(along), capacity=scales)
        if zero is not None:
            self.zero = append(self.zero, zero.squeeze(along), capacity=scales)

    def dequantized(self) -> Tensor:
        """Return the tokens [B, H, T, d], dequantized to their original dtype."""
        codes = unpack(self.codes, self.bits)
        grouped, along = self._grouped(codes)
        zero = None if self.zero is None else self.zero.unsqueeze(along)
        tokens = dequantize(grouped, self.scale.unsqueeze(along), zero)
        return tokens.flatten(along - 1, along)[..., : codes.shape[-1]]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, which acts on the batch dimension, to all tensors."""
        self.codes, self.scale = change(self.codes), change(self.scale)
        if self.zero is not None:
            self.zero = change(self.zero)

    def _grouped(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Split d, or T, of [B, H, T, d] into groups; return the tensor and the dimension of the group's elements."""
        if self.by_channel:
            return tokens.unflatten(-2, (tokens.shape[-2] // self.group, self.group)), -2
        return grouped_channels(tokens, self.group), -1


class SpannedCodes:
    """Tokens [B, H, T, d] quantized in different formats: `GroupedCodes` for each span of adjacent channels."""

    def __init__(
        self, like: Tensor, spans: Spans, group: int, *, by_channel: bool, clip: bool = False, reserved: int = 0
    ) -> None:
        """Make an empty container, see `GroupedCodes`.

        Raises:
            ValueError: the spans do not add up to the channels of `like`.
        """
        self.widths = [channels for _, channels in spans]
        if sum(self.widths) != like.shape[-1]:
            raise ValueError(f"spans have {sum(self.widths)} channels, but tokens have {like.shape[-1]}")
        slices = like.split(self.widths, dim=-1)
        formats = [format for format, _ in spans]
        self.parts = [
            GroupedCodes(part, format, group, by_channel=by_channel, clip=clip, reserved=reserved)
            for part, format in zip(slices, formats, strict=True)
        ]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.parts[0].tokens

    def append(self, tokens: Tensor) -> None:
        """Quantize and append tokens [B, H, n, d]; n is a multiple of the group."""
        for part, own in zip(self.parts, tokens.split(self.widths, dim=-1), strict=True):
            part.append(own)

    def dequantized(self) -> Tensor:
        """Return the tokens [B, H, T, d], dequantized to their original dtype."""
        return torch.cat([part.dequantized() for part in self.parts], dim=-1)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, which acts on the batch dimension, to all tensors."""
        for part in self.parts:
            part.map_rows(change)


class ExactTokens:
    """Unquantized tokens [B, H, T, d], with the interface of `GroupedCodes`."""

    def __init__(self, like: Tensor, *, reserved: int = 0) -> None:
        """Make an empty container; `reserved`: tokens to allocate memory for at once."""
        self.buffer, self.reserved = like[..., :0, :].clone(), reserved

    def append(self, tokens: Tensor) -> None:
        """Append tokens [B, H, n, d]."""
        self.buffer = append(self.buffer, tokens, capacity=self.reserved)

    def dequantized(self) -> Tensor:
        """Return the tokens [B, H, T, d]."""
        return self.buffer

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, which acts on the batch dimension."""
        self.buffer = change(self.buffer)
