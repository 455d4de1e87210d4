"""Keys and values as integers of 8, 4 or 2 bits: asymmetric, keys by channel and values by token, as KIVI stores them.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750. Keys have a few channels
that are large in every token, so the numbers of one channel share a scale; values have no such channels, so those of
one token do.

Tokens are quantised `group` at a time, as soon as there are that many behind the window of exact ones, and the forward
pass that completes a group already reads it quantised. A plain forward pass over a whole text therefore reads all of
it but the last tokens quantised, at every position, where decoding still has the most recent ones exact; and it lets a
scale depend on tokens after the one that reads it, in its own group. Its loss is near that of decoding and not the
same: judge a quantised cache by a loss that is read through the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .cache_layer import CompactLayer, check_full_attention

BITS = (8, 4, 2)


class QuantizedKVCache(Cache):
    """A cache of `QuantizedKVLayer`s, for any model whose layers keep keys and values of all tokens."""

    def __init__(self, bits: int, group: int = 32, window: int = 0, *, config: PreTrainedConfig | None = None) -> None:
        """`bits`, `group` and `window` as in `QuantizedKVLayer`; `config` of the model, to refuse what it cannot carry.

        Raises:
            ValueError: impossible settings, or a config with layers of another kind than full attention.
        """
        QuantizedKVLayer(bits, group, window)
        if config is not None:
            check_full_attention(config, QuantizedKVLayer.form)
        super().__init__(layer_class_to_replicate=partial(QuantizedKVLayer, bits, group, window))


class QuantizedKVLayer(CompactLayer):
    """The cache of one layer: the oldest tokens as codes, the rest, fewer than `window + group`, as they came.

    Keys and values may differ in their last dimension (the latent and the rotated part that stock `deepseek_v3` caches
    in their places, for instance).
    """

    form = "a quantised KV cache"

    def __init__(self, bits: int, group: int = 32, window: int = 0) -> None:
        """
        Args:
            bits: of a code: 8, 4 or 2.
            group: tokens that share a scale in a channel of the keys, and channels that do in a token of the values. A
                head whose size it does not divide is one group of values.
            window: of the most recent tokens, how many stay exact at least. KIVI keeps 128.

        Raises:
            ValueError: other bits, a negative window, or a group whose codes fill no whole bytes.
        """
        super().__init__()
        if bits not in BITS:
            raise ValueError(f"a KV cache of {bits} bits: 8, 4 or 2 are possible")
        if group < 1 or group * bits % 8 or window < 0:
            raise ValueError(
                f"a KV cache of {bits} bits with group {group} and window {window}: a group must be a positive "
                f"multiple of {8 // bits}, a window at least 0"
            )
        self.bits, self.group, self.window = bits, group, window

    def settings(self) -> tuple:
        """Bits, group, window."""
        return self.bits, self.group, self.window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, heads, head sizes, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :].clone(), value_states[..., :0, :].clone()
        self.key_codes = GroupedCodes(self.keys, self.bits, self.group, by_channel=True)
        self.value_codes = GroupedCodes(self.values, self.bits, self.group, by_channel=False)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, H, n, d] and returns those of all tokens [B, H, T, d], dequantised, in the dtype they had."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        complete = max(0, self.keys.shape[-2] - self.window) // self.group * self.group
        if complete:
            self.key_codes.append(self.keys[..., :complete, :])
            self.value_codes.append(self.values[..., :complete, :])
            # Copied, because a view would keep the quantised tokens alive.
            self.keys, self.values = self.keys[..., complete:, :].clone(), self.values[..., complete:, :].clone()
        return (
            torch.cat([self.key_codes.dequantized(), self.keys], dim=-2),
            torch.cat([self.value_codes.dequantized(), self.values], dim=-2),
        )

    def get_seq_length(self) -> int:
        """Tokens kept, in either form."""
        return self.key_codes.tokens + self.keys.shape[-2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that `query_length` more tokens will see, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forgets all tokens."""
        self.keys = self.values = self.key_codes = self.value_codes = None
        self.is_initialized = False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.key_codes.map_rows(change)
            self.value_codes.map_rows(change)


class GroupedCodes:
    """Tokens [B, H, T, d] as codes of a few bits, with a scale and a zero point for each group.

    Attributes:
        codes: [B, H, T·bits/8, d] uint8; consecutive tokens share a byte, the first in its lowest bits.
        scale, zero: of keys (by channel) [B, H, T/group, d], of values (by token) [B, H, T, groups of d]; in the dtype
            that the tokens have.
    """

    def __init__(self, like: Tensor, bits: int, group: int, *, by_channel: bool) -> None:
        """No tokens yet; batch, heads, d, dtype and device are those of `like` [B, H, any, d]."""
        self.bits, self.group, self.by_channel = bits, group, by_channel
        self._across = value_groups(like.shape[-1], group)
        groups = like.shape[-1] if by_channel else self._across
        self.codes = like.new_empty((*like.shape[:-2], 0, like.shape[-1]), dtype=torch.uint8)
        self.scale = like.new_empty((*like.shape[:-2], 0, groups))
        self.zero = self.scale.clone()

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.codes.shape[-2] * 8 // self.bits

    def append(self, tokens: Tensor) -> None:
        """Quantises tokens [B, H, n, d], n a multiple of the group."""
        if self.by_channel:
            grouped, along = tokens.unflatten(-2, (-1, self.group)), -2
        else:
            grouped, along = tokens.unflatten(-1, (self._across, -1)), -1
        codes, scale, zero = quantize(grouped, self.bits, along)
        packed = pack(codes.view(tokens.shape), self.bits)
        self.codes = torch.cat([self.codes, packed], dim=-2)
        self.scale = torch.cat([self.scale, scale.squeeze(along)], dim=-2)
        self.zero = torch.cat([self.zero, zero.squeeze(along)], dim=-2)

    def dequantized(self) -> Tensor:
        """The tokens [B, H, T, d] as their codes say, in the dtype they had."""
        codes = unpack(self.codes, self.bits)
        if self.by_channel:
            grouped, along = codes.unflatten(-2, (self.scale.shape[-2], self.group)), -2
        else:
            grouped, along = codes.unflatten(-1, (self._across, -1)), -1
        return dequantize(grouped, self.scale.unsqueeze(along), self.zero.unsqueeze(along)).view(codes.shape)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on the batch, to all three tensors."""
        self.codes, self.scale, self.zero = change(self.codes), change(self.scale), change(self.zero)


def quantize(values: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 2^bits - 1 of `values`, evenly spaced from the least to the greatest along `dim`.

    Returns:
        Codes, uint8 of the shape of `values`; step and least value, of size 1 along `dim`, in the dtype of `values`.
        A value is `code · step + least` to within half a step, and near the greatest value the rounding of the step.
    """
    exact = values.to(_wide(values.dtype))
    zero, greatest = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    scale = ((greatest - zero) / (2**bits - 1)).to(values.dtype)
    # The step as it is stored decides the codes. It is 0 where all values are equal.
    step = torch.where(scale > 0, scale, 1).to(exact.dtype)
    codes = ((exact - zero) / step).round_().clamp_(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, zero.to(values.dtype)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """`codes · scale + zero`, computed in fp32 at least, in the dtype of `scale`."""
    wide = _wide(scale.dtype)
    return torch.addcmul(zero.to(wide), codes.to(wide), scale.to(wide)).to(scale.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n, d] below 2^bits, uint8, as bytes [..., n·bits/8, d]; n must fill whole bytes."""
    if bits == 8:
        return codes
    parts = codes.unflatten(-2, (-1, 8 // bits))
    return (parts << _shifts(bits, codes.device)).sum(dim=-2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """What `pack` was given: [..., n, d] uint8 of bytes [..., n·bits/8, d]."""
    if bits == 8:
        return packed
    return ((packed.unsqueeze(-2) >> _shifts(bits, packed.device)) & (2**bits - 1)).flatten(-3, -2)


def value_groups(head_dim: int, group: int) -> int:
    """Groups in which the channels of one token's values are quantised."""
    return head_dim // group if head_dim % group == 0 else 1


def quantized_kv_bytes(
    bits: int,
    group: int,
    window: int,
    *,
    batch: int,
    heads: int,
    tokens: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> int:
    """Bytes that a `QuantizedKVLayer` holds after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
    quantized = max(0, tokens - window) // group * group
    codes = quantized * bits // 8 * (key_dim + value_dim)
    groups = quantized // group * key_dim + quantized * value_groups(value_dim, group)
    exact = (tokens - quantized) * (key_dim + value_dim)
    return batch * heads * (codes + dtype.itemsize * (2 * groups + exact))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Bit offsets of the codes in a byte [8/bits, 1], uint8."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device).unsqueeze(-1)
