"""Latents rescaled before they train, so that one learning rate suits what makes them and what reads them.

A latent is made by a row of the down-projection and read by a column of up-projections; c times the one and 1/c times
the other is the same function. Conversions choose c for their own ends: orthonormal columns in some metric leave rows
of thousandths beside columns of units. Adam moves every entry by about the learning rate, whatever its size, and so
destroys the rows before the columns have noticed. With entries of one size on both sides both move alike.

The factors are powers of two, so that the student computes bit for bit what it did.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.training.recording import decoder_of


@torch.no_grad()
def balance_latents(student: nn.Module) -> int:
    """Rescales latents whose two sides train, in place; returns how many.

    An attention says by `latent_slices` which outputs of its `kv_down` are latents, and by `latent_readers` all that
    reads them. Left as they are: latents of which a side does not train and would not be written, those that other
    layers read too, and those behind codes whose scales several latents share.
    """
    config = getattr(student, "config", None)
    codes = getattr(config, "kv_cache", None)
    if codes is not None and (codes["keys"] == "token" or config.streams):
        return 0
    changed = 0
    for layer in decoder_of(student).layers:
        attention = getattr(layer, "self_attn", None)
        blocks = getattr(attention, "latent_slices", ())
        for block, readers in zip(blocks, attention.latent_readers() if blocks else (), strict=False):
            down = [attention.kv_down.weight, *([] if attention.kv_down.bias is None else [attention.kv_down.bias])]
            if not readers or not all(each.requires_grad for each in down) or not all(map(_trains, readers)):
                continue
            scale = _scales(attention.kv_down.weight[block], readers)
            for each in down:
                each[block] *= scale.to(each.dtype).view(-1, *[1] * (each.ndim - 1))
            for reader in readers:
                reader /= scale.to(reader.dtype)
            changed += len(scale)
    return changed


def _trains(view: Tensor) -> bool:
    """Whether the parameter that a view is of trains; views made without gradients do not say so themselves."""
    base = view if view._base is None else view._base
    return base.requires_grad


def _scales(rows: Tensor, readers: list[Tensor]) -> Tensor:
    """Powers of two [r] that make entries of rows [r, D] as large as those of the readers' columns [·, r], fp32."""
    made = rows.float().square().mean(dim=1).sqrt()
    read = torch.cat([reader.float().square() for reader in readers]).mean(dim=0).sqrt()
    wanted = torch.where((made > 0) & (read > 0), (read / made.clamp(min=1e-30)).sqrt(), 1.0)
    return torch.exp2(wanted.log2().round())
