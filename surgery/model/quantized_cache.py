"""Keys and values as numbers of 8, 4, 3 or 2 bits, keys by channel and values by token, as KIVI stores them.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750. Keys have a few channels
that are large in every token, so the numbers of one channel share a scale; values have no such channels, so those of
one token do. Latents in the place of the keys are quantized by channel too, unless `keys` says otherwise.

Tokens are quantized `group` at a time, as soon as there are that many behind the window of exact ones, and the forward
pass that completes a group already reads it quantized. A plain forward pass over a whole text therefore reads all of
it but the last tokens quantized, at every position, where decoding still has the most recent ones exact; and it lets a
scale of a channel depend on tokens after the one that reads it, in its own group. Its loss is near that of decoding and
not the same: judge a quantized cache by a loss that is read through the cache.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .cache_layer import CompactLayer
from .growing import append, refill
from .quantization import BITS, PACKED, dequantize, grouped_channels, pack, quantize, token_groups, unpack

EXACT = "exact"
"""Format for as many bits as the model has."""

Spans = Sequence[tuple[str, int]]
"""Formats of adjacent channels, and how many have each."""

KEYS = ("channel", "token")
"""Sharing of a scale of keys: by the tokens of a channel, or by the channels of a token."""


class QuantizedKVLayer(CompactLayer):
    """The cache of one layer: the oldest tokens quantized, the rest, fewer than `window + group`, as they came.

    Keys and values may differ in their last dimension (the latent and the rotated part that stock `deepseek_v3` caches
    in their places, for instance), and that of the values may be 0.
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
            format: of a code: int8, int4, int3, int2 or fp8 (e4m3).
            group: tokens that share a scale in a channel of the keys, and channels that do in a token of the values. A
                head whose size it does not divide has the fewest nearly equal groups of at most that many.
            window: of the most recent tokens, how many stay exact at least. KIVI keeps 128.
            keys: "channel", or "token" to quantize the keys as the values are.
            sinks: first tokens that stay exact.
            value_format: of the values where it is another, or "exact": they are kept as they come.
            spans: (format, channels) of the keys' first channels, of the next ones, and so on to the last; none where
                all have `format`.
            clip: narrow the range of a group of keys to what leaves the least squared error.

        Raises:
            ValueError: another format, a negative window or number of sinks, or a group whose codes fill no whole
                bytes.
        """
        super().__init__()
        formats = [format, *([] if value_format in (None, EXACT) else [value_format]), *(each for each, _ in spans)]
        for each in formats:
            if each not in BITS:
                raise ValueError(f"a KV cache of {each!r}: {', '.join(BITS)} are possible")
            if group < 1 or group % PACKED[each] or window < 0 or sinks < 0:
                raise ValueError(
                    f"a KV cache of {each} with group {group}, window {window} and {sinks} sinks: a group must be a "
                    f"positive multiple of {PACKED[each]}, a window and sinks at least 0"
                )
        if keys not in KEYS:
            raise ValueError(f"keys quantized by {keys!r}: by {' or '.join(KEYS)} is possible")
        self.format, self.group, self.window, self.keys_by = format, group, window, keys
        self.sinks, self.value_format = sinks, value_format or format
        self.spans, self.clip = tuple((each, channels) for each, channels in spans), clip

    def settings(self) -> tuple:
        """Format, group, window, what the keys are quantized by, sinks, format of values, spans of keys, clip."""
        whole = self.format, self.group, self.window, self.keys_by, self.sinks
        return *whole, self.value_format, self.spans, self.clip

    def updates(self, cached: Any, past_length: int, new: int) -> Iterator[int]:
        """Bytes after an update, which dequantizes all tokens."""
        yield cached.held(past_length + new) + cached.token_bytes * (past_length + new)

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that it holds after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
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
        """Return how many of so many tokens are quantized."""
        return max(0, tokens - min(self.sinks, tokens) - self.window) // self.group * self.group

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, heads, head sizes, dtype and device from the first tokens."""
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
            of_values = {"by_channel": False, "reserved": options["reserved"]}
            self.value_codes = GroupedCodes(self.values, self.value_format, self.group, **of_values)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, H, n, d] and returns those of all tokens [B, H, T, d], dequantized, in the dtype they had."""
        self.append(key_states, value_states)
        return (
            torch.cat([self.first_keys, self.key_codes.dequantized(), self.keys], dim=-2),
            torch.cat([self.first_values, self.value_codes.dequantized(), self.values], dim=-2),
        )

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Adds tokens [B, H, n, d]."""
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
        """Tokens kept, in either form."""
        if not self.is_initialized:
            return 0
        return self.first_keys.shape[-2] + self.key_codes.tokens + self.keys.shape[-2]

    def reset(self) -> None:
        """Forgets all tokens."""
        self.keys = self.values = self.first_keys = self.first_values = self.key_codes = self.value_codes = None
        self.is_initialized = False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.first_keys, self.first_values = change(self.first_keys), change(self.first_values)
            self.key_codes.map_rows(change)
            self.value_codes.map_rows(change)


class GroupedCodes:
    """Tokens [B, H, T, d] quantized to codes of a few bits, with a scale and, of integers, a zero point for each group.

    Attributes:
        codes: [B, H, T·bits/8, d] uint8; consecutive tokens share a byte, the first in its lowest bits.
        scale, zero: by channel [B, H, T/group, d], by token [B, H, T, groups of d]; in the dtype that the tokens have.
            fp8 has no zero.
    """

    def __init__(
        self, like: Tensor, format: str, group: int, *, by_channel: bool, clip: bool = False, reserved: int = 0
    ) -> None:
        """No tokens yet; batch, heads, d, dtype and device are those of `like` [B, H, any, d].

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
        """Tokens held."""
        return self.codes.shape[-2] * 8 // self.bits

    def append(self, tokens: Tensor) -> None:
        """Quantizes tokens [B, H, n, d], n a multiple of the group."""
        grouped, along = self._grouped(tokens)
        codes, scale, zero = quantize(grouped, self.format, along, clip=self.clip)
        codes = codes.flatten(along - 1, along)[..., : tokens.shape[-1]]
        scales = self.reserved // self.group if self.by_channel else self.reserved
        self.codes = append(self.codes, pack(codes, self.bits), capacity=self.reserved * self.bits // 8)
        self.scale = append(self.scale, scale.squeeze(along), capacity=scales)
        if zero is not None:
            self.zero = append(self.zero, zero.squeeze(along), capacity=scales)

    def dequantized(self) -> Tensor:
        """The tokens [B, H, T, d] dequantized, in the dtype they had."""
        codes = unpack(self.codes, self.bits)
        grouped, along = self._grouped(codes)
        zero = None if self.zero is None else self.zero.unsqueeze(along)
        tokens = dequantize(grouped, self.scale.unsqueeze(along), zero)
        return tokens.flatten(along - 1, along)[..., : codes.shape[-1]]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on the batch, to all tensors."""
        self.codes, self.scale = change(self.codes), change(self.scale)
        if self.zero is not None:
            self.zero = change(self.zero)

    def _grouped(self, tokens: Tensor) -> tuple[Tensor, int]:
        """[B, H, T, d] with a group of d, or of T, as a dimension of its own; and which that is."""
        if self.by_channel:
            return tokens.unflatten(-2, (tokens.shape[-2] // self.group, self.group)), -2
        return grouped_channels(tokens, self.group), -1


class SpannedCodes:
    """Tokens [B, H, T, d] quantized in different formats: `GroupedCodes` of adjacent channels, side by side."""

    def __init__(
        self, like: Tensor, spans: Spans, group: int, *, by_channel: bool, clip: bool = False, reserved: int = 0
    ) -> None:
        """No tokens yet, see `GroupedCodes`.

        Raises:
            ValueError: the spans have other channels than `like`.
        """
        self.widths = [channels for _, channels in spans]
        if sum(self.widths) != like.shape[-1]:
            raise ValueError(f"codes of {sum(self.widths)} channels, and tokens have {like.shape[-1]}")
        slices = like.split(self.widths, dim=-1)
        formats = [format for format, _ in spans]
        self.parts = [
            GroupedCodes(part, format, group, by_channel=by_channel, clip=clip, reserved=reserved)
            for part, format in zip(slices, formats, strict=True)
        ]

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.parts[0].tokens

    def append(self, tokens: Tensor) -> None:
        """Quantizes tokens [B, H, n, d], n a multiple of the group."""
        for part, own in zip(self.parts, tokens.split(self.widths, dim=-1), strict=True):
            part.append(own)

    def dequantized(self) -> Tensor:
        """The tokens [B, H, T, d] dequantized, in the dtype they had."""
        return torch.cat([part.dequantized() for part in self.parts], dim=-1)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on the batch, to all tensors."""
        for part in self.parts:
            part.map_rows(change)


class ExactTokens:
    """Tokens [B, H, T, d] as they came, not quantized."""

    def __init__(self, like: Tensor, *, reserved: int = 0) -> None:
        """No tokens yet; `reserved`: tokens to allocate memory for at once."""
        self.buffer, self.reserved = like[..., :0, :].clone(), reserved

    def append(self, tokens: Tensor) -> None:
        """Adds tokens [B, H, n, d]."""
        self.buffer = append(self.buffer, tokens, capacity=self.reserved)

    def dequantized(self) -> Tensor:
        """The tokens [B, H, T, d]."""
        return self.buffer

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on the batch."""
        self.buffer = change(self.buffer)
