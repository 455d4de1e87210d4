"""Emulated KV caches of inference engines: quantized tokens, with sinks and a residual window in full precision.

A `Coder` encodes a tile of tokens to the tensors of a format and back. The cache layer stores these tensors, so bytes
are counted in the live cache and not computed from a bit width. There are two orders of quantization and attention:

- Formats with one token per tile and no window quantize new tokens first and then attend to them, as in vLLM and
  llama.cpp. One forward pass over a text then equals prefill and decoding.
- Formats with a window, or with several tokens per tile, attend first: queries read their own tile and the window
  before it in full precision. A long forward pass is split into chunks of `chunk` tokens, so that it reads earlier
  tokens as decoding does.
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
from surgery.eval.variants.cache_hook import install, windows_of, with_sliding_windows
from surgery.model.cache_argument import CACHE
from surgery.model.cache_layer import CacheLayer, Call, CompactLayer, own_cache
from surgery.model.quantization import pack, unpack

Parts = tuple[Tensor, ...]
"""Tensors [B, H, tiles, ...] that a coder produces."""


class Coder(ABC):
    """Abstract base class of a storage format for keys or values.

    Attributes:
        tile: tokens that are quantized together.
    """

    tile: int = 1

    @abstractmethod
    def encode(self, tokens: Tensor) -> Parts:
        """Encode tokens [B, H, n, d], n a multiple of `tile`; raises ValueError for an unsupported head size d."""

    @abstractmethod
    def decode(self, parts: Parts) -> Tensor:
        """Decode to the tokens [B, H, n, d] that attention reads, in any floating-point dtype."""


class Exact(Coder):
    """Full-precision storage."""

    def encode(self, tokens: Tensor) -> Parts:
        return (tokens,)

    def decode(self, parts: Parts) -> Tensor:
        return parts[0]


class CodedLayer(CompactLayer):
    """Cache layer that stores tokens encoded by coders, except for sinks and a residual window.

    Attributes:
        first_keys, first_values: [B, H, ≤ sinks, d], sinks in full precision.
        key_parts, value_parts: encoded tokens.
        keys, values: [B, H, n, d], full-precision tokens after the encoded ones.
    """

    form = "an engine's cache"

    def __init__(self, keys: Coder, values: Coder, sinks: int = 0, window: int = 0) -> None:
        """Keep the first `sinks` tokens and at least the last `window` tokens in full precision."""
        super().__init__()
        self.key_coder, self.value_coder, self.sinks, self.window = keys, values, sinks, window
        self.key_parts: Parts = ()
        self.value_parts: Parts = ()

    def fresh(self) -> CodedLayer:
        """Return an empty layer with the same settings."""
        return CodedLayer(self.key_coder, self.value_coder, self.sinks, self.window)

    @property
    def delayed(self) -> bool:
        """True if new tokens are read in full precision before they are encoded."""
        return self.window > 0 or self.key_coder.tile > 1

    def settings(self) -> tuple:
        """Return both coders, sinks and window."""
        return self.key_coder, self.value_coder, self.sinks, self.window

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes of the layer after `tokens` tokens that were decoded one by one."""
        tiles = self._num_coded(max(0, tokens - self.sinks)) // self.key_coder.tile
        total = (tokens - tiles * self.key_coder.tile) * heads * (key_dim + value_dim) * dtype.itemsize
        for coder, width in ((self.key_coder, key_dim), (self.value_coder, value_dim)):
            parts = coder.encode(torch.zeros(1, heads, coder.tile, width, dtype=dtype))
            total += tiles * sum(part.nbytes for part in parts)
        return batch * total

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate empty tensors with the batch size, heads, head sizes, dtype and device of the first tokens."""
        self.keys, self.values = key_states[..., :0, :].clone(), value_states[..., :0, :].clone()
        self.first_keys, self.first_values = self.keys.clone(), self.values.clone()
        self.key_parts = self.value_parts = ()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, n, d]; return all keys and values [B, H, T, d] as attention reads them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        missing = self.sinks - self.first_keys.shape[2]
        if missing:
            self.first_keys = torch.cat([self.first_keys, key_states[:, :, :missing]], 2)
            self.first_values = torch.cat([self.first_values, value_states[:, :, :missing]], 2)
        self.keys = torch.cat([self.keys, key_states[:, :, missing:]], 2)
        self.values = torch.cat([self.values, value_states[:, :, missing:]], 2)
        if not self.delayed:
            self._encode_tokens()
        read = self._read(self.key_coder, self.first_keys, self.key_parts, self.keys)
        read_values = self._read(self.value_coder, self.first_values, self.value_parts, self.values)
        if self.delayed:
            self._encode_tokens()
        return read, read_values

    def _num_coded(self, tokens: int) -> int:
        """Return how many of `tokens` tokens after the sinks are encoded."""
        return max(0, tokens - self.window) // self.key_coder.tile * self.key_coder.tile

    def _encode_tokens(self) -> None:
        if not (count := self._num_coded(self.keys.shape[2])):
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
        """Return the number of cached tokens, encoded or not."""
        if not self.is_initialized:
            return 0
        coded = self.key_parts[0].shape[2] * self.key_coder.tile if self.key_parts else 0
        return self.first_keys.shape[2] + coded + self.keys.shape[2]

    def reset(self) -> None:
        """Drop all tokens."""
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
    """Replace the KV cache of `model` by `CodedLayer`s, with a hook on its decoder; return it.

    Sliding-window layers keep transformers' cache layers. `chunk` is the maximum tokens per forward pass for `delayed`
    layers, which divides their sinks and tiles; 0: no limit.

    Raises:
        NoVariant: as `install`, or the format does not support the head sizes.
        SurgeryError: the model is a variant already. Raised later: a call passes a non-empty cache of another class.
    """

    windows = windows_of(model.config)

    def empty() -> list[CacheLayer]:
        return with_sliding_windows([layer.fresh() for layer in layers], windows)

    def prepare(decoder: nn.Module, call: Call) -> None:
        own_cache(decoder, call, empty())

    install(model, name, prepare, empty())
    if chunk:
        model.base_model.forward = wraps(model.base_model.forward)(partial(in_chunks, model.base_model.forward, chunk))
    return model


def in_chunks(forward: Callable, chunk: int, **call: Any) -> Any:
    """Call a decoder's `forward` on pieces that end at multiples of `chunk` tokens and concatenate the outputs."""
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
    """Pack codes [..., n] below 2^bits into bytes [..., n·bits/8], the first code in the lowest bits.

    Raises ValueError: the codes do not fill whole bytes.
    """
    if codes.shape[-1] * bits % 8 or (bits == 3 and codes.shape[-1] % 8):
        raise ValueError(f"{codes.shape[-1]} values of {bits} bits do not fill whole bytes")
    return pack(codes.to(torch.uint8).unsqueeze(-1), bits).squeeze(-1)


def unpacked(stored: Tensor, bits: int) -> Tensor:
    """Unpack the bytes of `packed` to float32 codes."""
    return unpack(stored.unsqueeze(-1), bits).squeeze(-1).float()


def hadamard(size: int) -> Tensor:
    """Return Sylvester's orthonormal Hadamard matrix [size, size], float32; symmetric, so its own inverse.

    Raises ValueError: `size` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"Hadamard rotation of {size} channels is not supported; the number must be a power of two")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated(tokens: Tensor, block: int) -> Tensor:
    """Rotate each block of `block` channels of tokens [..., d] by a Hadamard matrix, in float32; its own inverse."""
    blocks = tokens.float().unflatten(-1, (-1, block))
    return (blocks @ hadamard(block).to(tokens.device)).flatten(-2)
