"""The cache of an engine: first tokens and a recent window in full precision, the rest in the format's own bytes.

A format says how a tile of tokens becomes tensors and back (`Coder`). The layer holds these tensors, so that bytes are
counted in the live cache and not computed from a bit width. There are two orders of events:

- A format of one token a tile without a window is written first and then read, as vLLM and llama.cpp do it. One pass
  over a text and decoding are then one function.
- A format with a window, or with tiles of several tokens, is read first: queries see their own tile, and the window
  before it, in full precision. A long pass is cut into chunks of `chunk` tokens, which see earlier ones as decoding
  would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.common.errors import SurgeryError
from surgery.eval.variants.cache_hook import beside_windows, install, windows_of
from surgery.model.cache_argument import CACHE
from surgery.model.cache_layer import CacheLayer, Call, CompactLayer, own_cache
from surgery.model.quantization import pack, unpack

Parts = tuple[Tensor, ...]
"""Tensors [B, H, tiles, ...] that a coder stores."""


class Coder(ABC):
    """A storage format of keys or of values.

    Attributes:
        tile: tokens that are coded together.
    """

    tile: int = 1

    @abstractmethod
    def encode(self, tokens: Tensor) -> Parts:
        """Code tokens [B, H, n, d], n a multiple of `tile`. Raises ValueError for widths that the format lacks."""

    @abstractmethod
    def decode(self, parts: Parts) -> Tensor:
        """The tokens [B, H, n, d] that attention reads, in any floating-point dtype."""


class Exact(Coder):
    """Tokens as they come."""

    def encode(self, tokens: Tensor) -> Parts:
        return (tokens,)

    def decode(self, parts: Parts) -> Tensor:
        return parts[0]


class CodedLayer(CompactLayer):
    """The cache of one layer.

    Attributes:
        first_keys, first_values: [B, H, ≤ sinks, d], the first tokens.
        key_parts, value_parts: the coded tokens.
        keys, values: [B, H, n, d], the tokens after the coded ones.
    """

    form = "an engine's cache"

    def __init__(self, keys: Coder, values: Coder, sinks: int = 0, window: int = 0) -> None:
        """`sinks`: first tokens that stay in full precision; `window`: how many recent ones do at least."""
        super().__init__()
        self.key_coder, self.value_coder, self.sinks, self.window = keys, values, sinks, window
        self.key_parts: Parts = ()
        self.value_parts: Parts = ()

    def fresh(self) -> CodedLayer:
        """An empty layer of the same settings."""
        return CodedLayer(self.key_coder, self.value_coder, self.sinks, self.window)

    @property
    def delayed(self) -> bool:
        """True if tokens are read in full precision before they are coded."""
        return self.window > 0 or self.key_coder.tile > 1

    def settings(self) -> tuple:
        """Both coders, sinks, window."""
        return self.key_coder, self.value_coder, self.sinks, self.window

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that it holds after `tokens` tokens, decoded one by one."""
        tiles = self._coded(max(0, tokens - self.sinks)) // self.key_coder.tile
        total = (tokens - tiles * self.key_coder.tile) * heads * (key_dim + value_dim) * dtype.itemsize
        for coder, width in ((self.key_coder, key_dim), (self.value_coder, value_dim)):
            parts = coder.encode(torch.zeros(1, heads, coder.tile, width, dtype=dtype))
            total += tiles * sum(part.nbytes for part in parts)
        return batch * total

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch, heads, head sizes, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :].clone(), value_states[..., :0, :].clone()
        self.first_keys, self.first_values = self.keys.clone(), self.values.clone()
        self.key_parts = self.value_parts = ()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add tokens [B, H, n, d]; returns those of all tokens [B, H, T, d] as attention reads them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        missing = self.sinks - self.first_keys.shape[2]
        if missing:
            self.first_keys = torch.cat([self.first_keys, key_states[:, :, :missing]], 2)
            self.first_values = torch.cat([self.first_values, value_states[:, :, :missing]], 2)
        self.keys = torch.cat([self.keys, key_states[:, :, missing:]], 2)
        self.values = torch.cat([self.values, value_states[:, :, missing:]], 2)
        if not self.delayed:
            self._code()
        read = self._read(self.key_coder, self.first_keys, self.key_parts, self.keys)
        read_values = self._read(self.value_coder, self.first_values, self.value_parts, self.values)
        if self.delayed:
            self._code()
        return read, read_values

    def _coded(self, tokens: int) -> int:
        """Count the coded ones of so many tokens after the first ones."""
        return max(0, tokens - self.window) // self.key_coder.tile * self.key_coder.tile

    def _code(self) -> None:
        if not (count := self._coded(self.keys.shape[2])):
            return
        new = self.key_coder.encode(self.keys[:, :, :count]), self.value_coder.encode(self.values[:, :, :count])
        self.key_parts, self.value_parts = (
            tuple(torch.cat(pair, 2) for pair in zip(old, parts, strict=True)) if old else parts
            for old, parts in zip((self.key_parts, self.value_parts), new, strict=True)
        )
        self.keys, self.values = self.keys[:, :, count:].clone(), self.values[:, :, count:].clone()

    def _read(self, coder: Coder, first: Tensor, parts: Parts, recent: Tensor) -> Tensor:
        coded = [coder.decode(parts).to(recent.dtype)] if parts else []
        return torch.cat([first, *coded, recent], dim=2)

    def get_seq_length(self) -> int:
        """Tokens kept, in either form."""
        if not self.is_initialized:
            return 0
        coded = self.key_parts[0].shape[2] * self.key_coder.tile if self.key_parts else 0
        return self.first_keys.shape[2] + coded + self.keys.shape[2]

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = self.first_keys = self.first_values = None
        self.key_parts = self.value_parts = ()
        self.is_initialized = False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.first_keys, self.first_values = change(self.first_keys), change(self.first_values)
            self.key_parts = tuple(map(change, self.key_parts))
            self.value_parts = tuple(map(change, self.value_parts))


def coded_cache(model: PreTrainedModel, name: str, layers: Sequence[CodedLayer], chunk: int = 0) -> PreTrainedModel:
    """Make every attention of `model` read keys and values as `CodedLayer`s hold them.

    Args:
        layers: one for each layer of the model, with the settings of the cache. Layers with a window keep transformers'
            own.
        chunk: tokens of one pass at most, for layers that are `delayed`; divides their sinks and tiles. 0: any number.

    Returns:
        `model` itself, with a hook on its decoder.

    Raises:
        NoVariant: the format has no such heads, or the model is no decoder in which some layer has full attention.
        SurgeryError: it is a variant already. Later: a call with a filled cache of another kind.
    """

    windows = windows_of(model.config)

    def empty() -> list[CacheLayer]:
        return beside_windows([layer.fresh() for layer in layers], windows)

    def prepare(decoder: nn.Module, call: Call) -> None:
        own_cache(decoder, call, empty())

    install(model, name, prepare, empty())
    if chunk:
        model.base_model.forward = wraps(model.base_model.forward)(partial(_chunked, model.base_model.forward, chunk))
    return model


def _chunked(forward: Callable, chunk: int, **call: Any) -> Any:
    """Call a decoder's `forward` on pieces that end at multiples of `chunk` tokens; returns one output."""
    cache: Cache = call[CACHE]
    name = "inputs_embeds" if call.get("input_ids") is None else "input_ids"
    new, past_length = call.get(name), cache.get_seq_length()
    if new is None or past_length % chunk + new.shape[1] <= chunk:
        return forward(**call)
    if call.get("output_hidden_states") or call.get("output_attentions"):
        raise SurgeryError("this cache is read in chunks, which have no hidden states or attentions of all layers")
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    if mask is not None and mask.ndim != 2:
        raise SurgeryError(f"this cache is read in chunks: give a mask [batch, tokens], not {list(mask.shape)}")
    states, output, start = [], None, 0
    while start < new.shape[1]:
        stop = min(new.shape[1], start + chunk - (past_length + start) % chunk)
        part = {name: new[:, start:stop], "attention_mask": None if mask is None else mask[:, : past_length + stop]}
        part["position_ids"] = None if positions is None else positions[..., start:stop]
        output = forward(**call | part)
        states.append(output[0])
        start = stop
    whole = torch.cat(states, dim=1)
    if isinstance(output, tuple):
        return whole, *output[1:]
    output.last_hidden_state = whole
    return output


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] below 2^bits as bytes [..., n·bits/8], the first in the lowest bits.

    Raises:
        ValueError: they fill no whole bytes.
    """
    if codes.shape[-1] * bits % 8 or (bits == 3 and codes.shape[-1] % 8):
        raise ValueError(f"{codes.shape[-1]} values of {bits} bits fill no whole bytes")
    return pack(codes.to(torch.uint8).unsqueeze(-1), bits).squeeze(-1)


def unpacked(stored: Tensor, bits: int) -> Tensor:
    """Return the values that `packed` packed, in float32."""
    return unpack(stored.unsqueeze(-1), bits).squeeze(-1).float()


def hadamard(size: int) -> Tensor:
    """Sylvester's orthogonal Hadamard matrix [size, size], float32; symmetric, its own inverse.

    Raises:
        ValueError: the size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard rotation of {size} channels: a power of two is needed")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated(tokens: Tensor, block: int) -> Tensor:
    """Tokens [..., d] with a Hadamard rotation of each `block` channels, in float32; twice is nothing."""
    blocks = tokens.float().unflatten(-1, (-1, block))
    return (blocks @ hadamard(block).to(tokens.device)).flatten(-2)
