"""Decoders with multi-axis RoPE, whose pairs rotate by positions in time, height or width, as in Qwen's models.

Text tokens have three equal positions. Image tokens have different ones, which do not follow from their index in the
cache. Attention that rotates keys when it reads them needs the positions of all tokens. They are stored on the cache,
once for all layers, from the first call on that passes three axes.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

import torch
from torch import nn
from transformers import Cache, DynamicCache

from .cache_argument import CACHE, takes_cache
from .cache_layer import keeps_cache
from .family_decoders import FamilyDecoder
from .growing import append

AXES = 3


class AxisDecoder(FamilyDecoder):
    """Mixin that `family_attention_class` puts before a family's decoder class.

    It passes `axis_positions` [3, B, S] of all cached and new tokens to the attention, or none if all positions are
    indices in the cache.
    """

    def axes_of(self, frequencies: tuple[float, ...]) -> list[int] | None:
        """Return the position axis of each frequency's pair; None if the family lacks one of the frequencies.

        Frequency 0, without rotation, gets axis 0.
        """
        with torch.device("cpu"):  # the decoder may be on the meta device
            rotary: nn.Module = type(self.rotary_emb)(self.config)
            unit = torch.eye(AXES, dtype=torch.long)[:, :, None]  # row r is at position 1 of axis r alone
            _, sin = rotary(torch.zeros(1, dtype=torch.float64), unit)
        axes = sin[:, 0, : len(rotary.inv_freq)].abs().argmax(dim=0).tolist()
        axis_of = dict(zip(rotary.inv_freq.tolist(), axes, strict=True)) | {0.0: 0}
        return [axis_of[each] for each in frequencies] if axis_of.keys() >= set(frequencies) else None

    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        *,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ):
        """Run the family's decoder."""
        if cache is None and keeps_cache(self, kwargs):
            cache = DynamicCache(config=self.config)
        new = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        positions = _positions(position_ids, cache, *new.shape[:2], new.device)
        if positions is not None:
            kwargs["axis_positions"] = positions
        kwargs[CACHE] = cache
        outputs = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if positions is not None and cache is not None:
            cache.axis_positions = positions
        return outputs


def _positions(
    position_ids: torch.Tensor | None, cache: Cache | None, batch: int, tokens: int, device: torch.device
) -> torch.Tensor | None:
    """Return the positions of all tokens [3, B, S]; None if no call has passed several axes.

    Tokens without positions get their index in the cache.
    """
    cached = getattr(cache, "axis_positions", None)
    if cached is None and (position_ids is None or position_ids.ndim == 2):
        return None
    past_length = 0 if cache is None else cache.get_seq_length()
    if cached is None:
        cached = torch.arange(past_length, device=device, dtype=torch.int32).expand(AXES, batch, -1)
    if cached.shape[-1] != past_length or cached.device != device:
        cached = cached[..., :past_length].to(device)
    if position_ids is None:
        position_ids = torch.arange(past_length, past_length + tokens, device=device)
    # A fourth leading row, if any, holds the positions for masks.
    new = position_ids[-AXES:] if position_ids.ndim == 3 else position_ids
    return append(cached, new.to(cached).expand(AXES, batch, -1), dim=-1)


def decoder_class(family: str) -> type[FamilyDecoder]:
    """Return the mixin of a family's decoder class."""
    return AxisDecoder
