"""Keys and values as numbers of 8, 4, 3 or 2 bits, keys by channel and values by token, as KIVI stores them.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750. Keys have a few channels
that are large in every token, so the numbers of one channel share a scale; values have no such channels, so those of
one token do. A latent in the place of the keys has none either: its keys are quantised by token.

Integers are asymmetric, a scale and a zero point a group; fp8 (e4m3) codes have a scale alone, which takes the largest
number of the group to the format's largest.

Where an error counts by its square, as it does in latents that are worth little each, two bits between the extremes of
a group are spent badly. With `clip` a group's range is narrowed to that of five which leaves the least squared error.

Tokens are quantised `group` at a time, as soon as there are that many behind the window of exact ones, and the forward
pass that completes a group already reads it quantised. A plain forward pass over a whole text therefore reads all of
it but the last tokens quantised, at every position, where decoding still has the most recent ones exact; and it lets a
scale of a channel depend on tokens after the one that reads it, in its own group. Its loss is near that of decoding and
not the same: judge a quantised cache by a loss that is read through the cache.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .cache_layer import CompactLayer, check_full_attention

BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8": 8}
"""Bits of a code, by format."""

PACKED = {format: 8 // math.gcd(8, bits) for format, bits in BITS.items()}
"""Codes that fill whole bytes, at least, by format."""

EXACT = "exact"
"""In the place of a format: as many bits as the model has."""

Spans = Sequence[tuple[str, int]]
"""Formats of adjacent channels, and how many have each."""

KEYS = ("channel", "token")
"""What may share a scale of keys: the tokens of a channel, or the channels of a token."""

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of the range of a group between which `clip` chooses; numbers beyond take the nearest code."""

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max


class QuantizedKVCache(Cache):
    """A cache of `QuantizedKVLayer`s, for any model whose layers keep keys and values of all tokens."""

    def __init__(
        self,
        format: str,
        group: int = 32,
        window: int = 0,
        keys: str = "channel",
        *,
        config: PreTrainedConfig | None = None,
    ) -> None:
        """Settings as in `QuantizedKVLayer`; `config` of the model, to refuse what it cannot carry.

        Raises:
            ValueError: impossible settings, or a config with layers of another kind than full attention.
        """
        QuantizedKVLayer(format, group, window, keys)
        if config is not None:
            check_full_attention(config, QuantizedKVLayer.form)
        super().__init__(layer_class_to_replicate=partial(QuantizedKVLayer, format, group, window, keys))


class QuantizedKVLayer(CompactLayer):
    """The cache of one layer: the oldest tokens as codes, the rest, fewer than `window + group`, as they came.

    Keys and values may differ in their last dimension (the latent and the rotated part that stock `deepseek_v3` caches
    in their places, for instance), and that of the values may be 0.
    """

    form = "a quantised KV cache"
    reads_ahead = True
    hands_on_codes = False
    """Whether `update` returns the layer itself, twice, for an attention that reads its codes as they are."""

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
            keys: "channel", or "token" to quantise the keys as the values are.
            sinks: first tokens that stay exact.
            value_format: of the values' codes where it is another, or "exact": they are kept as they come.
            spans: (format, channels) of the keys' first channels, of the next ones, and so on to the last; none where
                all have `format`.
            clip: narrow the range of a group of keys to what leaves the least squared error.

        Raises:
            ValueError: another format, a negative window or number of sinks, or a group whose codes fill no whole
                bytes.
        """
        super().__init__()
        coded = [format, *([] if value_format in (None, EXACT) else [value_format]), *(each for each, _ in spans)]
        for each in coded:
            if each not in BITS:
                raise ValueError(f"a KV cache of {each!r}: {', '.join(BITS)} are possible")
            if group < 1 or group % PACKED[each] or window < 0 or sinks < 0:
                raise ValueError(
                    f"a KV cache of {each} with group {group}, window {window} and {sinks} sinks: a group must be a "
                    f"positive multiple of {PACKED[each]}, a window and sinks at least 0"
                )
        if keys not in KEYS:
            raise ValueError(f"keys quantised by {keys!r}: by {' or '.join(KEYS)} is possible")
        self.format, self.group, self.window, self.keys_by = format, group, window, keys
        self.sinks, self.value_format = sinks, value_format or format
        self.spans, self.clip = tuple((each, channels) for each, channels in spans), clip

    def settings(self) -> tuple:
        """Format, group, window, what the keys are quantised by, sinks, format of values, spans of keys, clip."""
        whole = self.format, self.group, self.window, self.keys_by, self.sinks
        return *whole, self.value_format, self.spans, self.clip

    @property
    def of_one_format(self) -> bool:
        """Whether all tokens but the latest are codes of one format that kernels read as they are."""
        in_bytes = PACKED[self.format] * BITS[self.format] == 8
        return in_bytes and not self.sinks and not self.spans and self.value_format == self.format

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """`quantized_kv_bytes` of these settings."""
        return quantized_kv_bytes(
            *self.settings(),
            batch=batch,
            heads=heads,
            tokens=tokens,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, heads, head sizes, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :].clone(), value_states[..., :0, :].clone()
        self.first_keys, self.first_values = self.keys.clone(), self.values.clone()
        said = {"by_channel": self.keys_by == "channel", "clip": self.clip}
        if self.spans:
            self.key_codes = SpannedCodes(self.keys, self.spans, self.group, **said)
        else:
            self.key_codes = GroupedCodes(self.keys, self.format, self.group, **said)
        if self.value_format == EXACT:
            self.value_codes = ExactTokens(self.values)
        else:
            self.value_codes = GroupedCodes(self.values, self.value_format, self.group, by_channel=False)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, H, n, d] and returns those of all tokens [B, H, T, d], dequantised, in the dtype they had."""
        self.append(key_states, value_states)
        if self.hands_on_codes:
            return self, self
        return (
            torch.cat([self.first_keys, self.key_codes.dequantized(), self.keys], dim=-2),
            torch.cat([self.first_values, self.value_codes.dequantized(), self.values], dim=-2),
        )

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Adds tokens [B, H, n, d]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if missing := self.sinks - self.first_keys.shape[-2]:
            self.first_keys = torch.cat([self.first_keys, key_states[..., :missing, :]], dim=-2)
            self.first_values = torch.cat([self.first_values, value_states[..., :missing, :]], dim=-2)
            key_states, value_states = key_states[..., missing:, :], value_states[..., missing:, :]
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        complete = max(0, self.keys.shape[-2] - self.window) // self.group * self.group
        if complete:
            self.key_codes.append(self.keys[..., :complete, :])
            self.value_codes.append(self.values[..., :complete, :])
            # Copied, because a view would keep the quantised tokens alive.
            self.keys, self.values = self.keys[..., complete:, :].clone(), self.values[..., complete:, :].clone()

    def get_seq_length(self) -> int:
        """Tokens kept, in either form."""
        if not self.is_initialized:
            return 0
        return self.first_keys.shape[-2] + self.key_codes.tokens + self.keys.shape[-2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that `query_length` more tokens will see, and the position of the first."""
        return self.get_seq_length() + query_length, 0

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
    """Tokens [B, H, T, d] as codes of a few bits, with a scale and, of integers, a zero point for each group.

    Attributes:
        codes: [B, H, T·bits/8, d] uint8; consecutive tokens share a byte, the first in its lowest bits.
        scale, zero: by channel [B, H, T/group, d], by token [B, H, T, groups of d]; in the dtype that the tokens have.
            fp8 has no zero.
    """

    def __init__(self, like: Tensor, format: str, group: int, *, by_channel: bool, clip: bool = False) -> None:
        """No tokens yet; batch, heads, d, dtype and device are those of `like` [B, H, any, d]."""
        self.format, self.bits, self.group, self.by_channel = format, BITS[format], group, by_channel
        self.clip = clip
        groups = like.shape[-1] if by_channel else token_groups(like.shape[-1], group)
        self.codes = like.new_empty((*like.shape[:-2], 0, like.shape[-1]), dtype=torch.uint8)
        self.scale = like.new_empty((*like.shape[:-2], 0, groups))
        self.zero = None if format == "fp8" else self.scale.clone()

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.codes.shape[-2] * 8 // self.bits

    def append(self, tokens: Tensor) -> None:
        """Quantises tokens [B, H, n, d], n a multiple of the group."""
        grouped, along = self._grouped(tokens)
        codes, scale, zero = quantize(grouped, self.format, along, clip=self.clip)
        codes = codes.flatten(along - 1, along)[..., : tokens.shape[-1]]
        self.codes = torch.cat([self.codes, pack(codes, self.bits)], dim=-2)
        self.scale = torch.cat([self.scale, scale.squeeze(along)], dim=-2)
        if zero is not None:
            self.zero = torch.cat([self.zero, zero.squeeze(along)], dim=-2)

    def dequantized(self) -> Tensor:
        """The tokens [B, H, T, d] as their codes say, in the dtype they had."""
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
    """Tokens [B, H, T, d] as codes of different formats: `GroupedCodes` of adjacent channels, side by side."""

    def __init__(self, like: Tensor, spans: Spans, group: int, *, by_channel: bool, clip: bool = False) -> None:
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
            GroupedCodes(part, format, group, by_channel=by_channel, clip=clip)
            for part, format in zip(slices, formats, strict=True)
        ]

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.parts[0].tokens

    def append(self, tokens: Tensor) -> None:
        """Quantises tokens [B, H, n, d], n a multiple of the group."""
        for part, own in zip(self.parts, tokens.split(self.widths, dim=-1), strict=True):
            part.append(own)

    def dequantized(self) -> Tensor:
        """The tokens [B, H, T, d] as their codes say, in the dtype they had."""
        return torch.cat([part.dequantized() for part in self.parts], dim=-1)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on the batch, to all tensors."""
        for part in self.parts:
            part.map_rows(change)


class ExactTokens:
    """Tokens [B, H, T, d] as they came, in the place of codes."""

    def __init__(self, like: Tensor) -> None:
        """No tokens yet."""
        self.held = like[..., :0, :].clone()

    def append(self, tokens: Tensor) -> None:
        """Adds tokens [B, H, n, d]."""
        self.held = torch.cat([self.held, tokens], dim=-2)

    def dequantized(self) -> Tensor:
        """The tokens [B, H, T, d]."""
        return self.held

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on the batch."""
        self.held = change(self.held)


def quantize(values: Tensor, format: str, dim: int, *, clip: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of `values`, whose groups lie along `dim`.

    Integers are evenly spaced from the least value to the greatest: a value is `code · scale + zero` to within half a
    step, and near the greatest value the rounding of the step. With `clip` they are spaced over the share of that range
    among `CLIPS` that leaves the group the least squared error. An fp8 code times the scale is a value to within a
    sixteenth of it, or 2^-10 scales if that is more.

    Returns:
        Codes of the shape of `values`, uint8, of fp8 the bits of the number; scale and zero, of size 1 along `dim`, in
        the dtype of `values`. fp8 has no zero.
    """
    exact = values.to(_wide(values.dtype))
    if format == "fp8":
        scale = (exact.abs().amax(dim, keepdim=True) / FLOAT8_MAX).to(values.dtype)
        # The scale as it is stored may be too small for the greatest value; beyond the range older torch gives NaN.
        codes = (exact / _divisor(scale, exact.dtype)).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        return codes.view(torch.uint8), scale, None
    least, greatest = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    codes, scale, zero = _evenly_spaced(exact, least, greatest, format, values.dtype)
    if clip:
        error = _squared_error(exact, codes, scale, zero, dim)
        for share in CLIPS[1:]:
            middle, half = (greatest + least) / 2, (greatest - least) * (share / 2)
            other = _evenly_spaced(exact, middle - half, middle + half, format, values.dtype)
            its_error = _squared_error(exact, *other, dim)
            better = its_error < error
            codes, scale, zero = (
                torch.where(better, new, old) for new, old in zip(other, (codes, scale, zero), strict=True)
            )
            error = torch.minimum(error, its_error)
    return codes.to(torch.uint8), scale, zero


def _evenly_spaced(
    exact: Tensor, least: Tensor, greatest: Tensor, format: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in the dtype of `exact`, scale and zero in `dtype`, of integers from `least` to `greatest`."""
    most = 2 ** BITS[format] - 1
    scale = ((greatest - least) / most).to(dtype)
    codes = ((exact - least) / _divisor(scale, exact.dtype)).round_().clamp_(0, most)
    return codes, scale, least.to(dtype)


def _squared_error(exact: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, dim: int) -> Tensor:
    return (
        torch.addcmul(zero.to(exact.dtype), codes, scale.to(exact.dtype)).sub_(exact).square_().sum(dim, keepdim=True)
    )


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """`codes · scale + zero`, or fp8 codes times the scale; in fp32 at least, then in the dtype of `scale`."""
    wide = _wide(scale.dtype)
    if zero is None:
        return (codes.contiguous().view(FLOAT8).to(wide) * scale.to(wide)).to(scale.dtype)
    return torch.addcmul(zero.to(wide), codes.to(wide), scale.to(wide)).to(scale.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n, d] below 2^bits, uint8, as bytes [..., n·bits/8, d]; n must fill whole bytes.

    Bits of consecutive codes follow each other, the first code in the lowest: eight of three bits fill three bytes.
    """
    if bits == 8:
        return codes
    size = math.lcm(8, bits)  # bits that begin and end with a code and with a byte
    parts = codes.unflatten(-2, (codes.shape[-2] * bits // size, size // bits))
    if size == 8:
        return (parts << _shifts(bits, 8, codes)).sum(dim=-2, dtype=torch.uint8)
    word = (parts.int() << _shifts(bits, size, parts.int())).sum(dim=-2, keepdim=True, dtype=torch.int32)
    return ((word >> _shifts(8, size, word)) & 0xFF).to(torch.uint8).flatten(-3, -2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """What `pack` was given: [..., n, d] uint8 of bytes [..., n·bits/8, d]."""
    if bits == 8:
        return packed
    size = math.lcm(8, bits)
    if size == 8:
        return ((packed.unsqueeze(-2) >> _shifts(bits, 8, packed)) & (2**bits - 1)).flatten(-3, -2)
    parts = packed.unflatten(-2, (packed.shape[-2] * 8 // size, size // 8)).int()
    word = (parts << _shifts(8, size, parts)).sum(dim=-2, keepdim=True, dtype=torch.int32)
    return ((word >> _shifts(bits, size, word)) & (2**bits - 1)).to(torch.uint8).flatten(-3, -2)


def token_groups(width: int, group: int) -> int:
    """Groups in which the `width` channels of one token are quantised: the fewest of at most `group`."""
    return -(-width // group)


def grouped_channels(tokens: Tensor, group: int) -> Tensor:
    """Tokens [..., d] with the channels that share a scale as a dimension of their own: [..., groups, size]."""
    groups = token_groups(tokens.shape[-1], group)
    size = -(-tokens.shape[-1] // groups) if groups else group
    if missing := groups * size - tokens.shape[-1]:
        # The last channel again, so that the last groups are as long as the first and no scale changes.
        tokens = torch.cat([tokens, tokens[..., -1:].expand(*tokens.shape[:-1], missing)], dim=-1)
    return tokens.unflatten(-1, (groups, size))


def quantized_kv_bytes(
    format: str,
    group: int,
    window: int,
    keys: str = "channel",
    sinks: int = 0,
    value_format: str | None = None,
    spans: Spans = (),
    clip: bool = False,
    *,
    batch: int,
    heads: int,
    tokens: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> int:
    """Bytes that a `QuantizedKVLayer` holds after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
    quantized = max(0, tokens - min(sinks, tokens) - window) // group * group

    def held(format: str, width: int, by_channel: bool) -> int:
        if format == EXACT:
            return quantized * width * dtype.itemsize
        groups = quantized // group * width if by_channel else quantized * token_groups(width, group)
        numbers = 1 if format == "fp8" else 2
        return quantized * BITS[format] // 8 * width + numbers * groups * dtype.itemsize

    codes = sum(held(each, width, keys == "channel") for each, width in spans or ((format, key_dim),))
    codes += held(value_format or format, value_dim, by_channel=False)
    return batch * heads * (codes + (tokens - quantized) * (key_dim + value_dim) * dtype.itemsize)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _divisor(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is stored, which decides the codes; 1 where it is 0, as it is of equal values."""
    return torch.where(scale > 0, scale, 1).to(dtype)


def _shifts(bits: int, size: int, like: Tensor) -> Tensor:
    """Where numbers of so many bits begin in `size` bits, [size/bits, 1] in the dtype of another tensor."""
    return torch.arange(0, size, bits, dtype=like.dtype, device=like.device).unsqueeze(-1)
