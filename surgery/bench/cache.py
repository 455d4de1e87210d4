"""Caches that are filled at random to a context, and do not grow: a decoding step at one length, again and again."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from surgery.common.errors import SurgeryError
from surgery.eval.tensor_bytes import plain_tensors, storage_bytes
from surgery.model.cache_argument import returned_cache


class SteadyLayer(DynamicLayer):
    """Keys and values of a fixed number of tokens, allocated once, and one slot behind them for the newest.

    A step writes to that slot and reads everything, without the copy by which a plain cache grows; the next step does
    the same. A CUDA graph of the step can therefore be replayed.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Takes keys and values [B, H, S + 1, ·]; what is in the last slot is overwritten."""
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes one token [B, H, 1, ·] and returns all."""
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens before the newest."""
        return self.keys.shape[-2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a step sees, and the position of the first."""
        return self.keys.shape[-2], 0


@torch.no_grad()
def steady_cache(model, batch: int, context: int, device: torch.device) -> DynamicCache:
    """A cache as the model fills it, with random tokens in place of a prompt: reading 128k tokens takes too long.

    Raises:
        SurgeryError: the model keeps something else than keys and values of all tokens (codes, windows, shared bases).
    """
    probe = returned_cache(model(torch.zeros(batch, 1, dtype=torch.long, device=device), use_cache=True))
    layers = getattr(probe, "layers", [])
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or type(probe).__name__
        raise SurgeryError(f"bench decode fills plain caches only, this model keeps {kinds}")
    generator = torch.Generator(device=device).manual_seed(0)
    cache = DynamicCache()
    cache.layers = [
        SteadyLayer(*(_random(part, context + 1, generator) for part in (layer.keys, layer.values))) for layer in layers
    ]
    return cache


def held_bytes(cache: DynamicCache) -> int:
    """Bytes of a cache's tensors."""
    return storage_bytes(plain_tensors([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]))


def _random(like: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    made = like.new_empty(*like.shape[:2], tokens, like.shape[-1])
    return made.normal_(0.0, 1.0, generator=generator)
