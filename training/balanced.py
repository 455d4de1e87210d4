"""Rescaling of latents before training, so that one learning rate suits down- and up-projections.

A latent element is written by a row of the down-projection and read by a column of the up-projections. Multiplying the
row by c and the column by 1/c leaves the function unchanged. Conversions leave rows of magnitude 1e-3 next to columns
of magnitude 1. Adam moves every weight by about the learning rate, whatever its magnitude, so the rows are destroyed
before the columns have moved.

In the MLA classes of transformers, the adjacent pairs of the shared rotary key are rescaled likewise. Latents after a
norm are rescaled only if the conversion made that norm neutral. The scales are powers of two, so that the student's
output stays bit-identical, except next to a constant channel of the stock class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.training.recording import decoder_of


@dataclass(frozen=True)
class _Bundle:
    """Latent elements that can be rescaled alone: views [r, ...] of weights that write and [..., r] that read them."""

    producers: list[Tensor]
    read: list[Tensor]
    factors: Tensor | float = 1.0
    shared: int = 1

    @property
    def trains(self) -> bool:
        """Return whether both sides train."""
        return bool(self.read) and all(map(_trains, (*self.producers, *self.read)))

    def rescale(self) -> int:
        """Equalize the RMS of both sides in place; return the number of latent elements."""
        rows = (self.producers[0].float().square().mean(dim=1) / torch.as_tensor(self.factors).square()).to(
            torch.float32
        )
        columns = torch.cat([reader.float().flatten(0, -2).square() for reader in self.read]).mean(dim=0)
        row_rms, column_rms = (each.view(-1, self.shared).mean(dim=1).sqrt() for each in (rows, columns))
        ratio = torch.where((row_rms > 0) & (column_rms > 0), (column_rms / row_rms.clamp(min=1e-30)).sqrt(), 1.0)
        scale = torch.exp2(ratio.log2().round()).repeat_interleave(self.shared)
        for each in self.producers:
            each *= scale.to(each.dtype).view(-1, *[1] * (each.ndim - 1))
        for reader in self.read:
            reader /= scale.to(reader.dtype)
        return len(scale)


@torch.no_grad()
def balance_latents(student: nn.Module, factors: Mapping[str, Tensor] | None = None) -> int:
    """Rescale in place the latents whose producers and readers both train; return their number.

    A custom attention declares by `latent_slices` which outputs of its `kv_down` are latents, and by `latent_readers`
    the weights that read them; stock MLA is recognized by its parameter names. `factors` are learning-rate multipliers
    by parameter name.
    """
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    factors_by_id = {id_: factors[name] for id_, name in names.items() if name in (factors or {})}
    changed = 0
    for layer in decoder_of(student).layers:
        attention = getattr(layer, "self_attn", None)
        bundles = (
            _stock_bundles(attention, factors_by_id)
            if hasattr(attention, "kv_a_proj_with_mqa")
            else _custom_bundles(attention)
        )
        changed += sum(bundle.rescale() for bundle in bundles if bundle.trains)
    return changed


def _custom_bundles(attention: nn.Module | None) -> Iterator[_Bundle]:
    blocks = getattr(attention, "latent_slices", ())
    for block, readers in zip(blocks, attention.latent_readers() if blocks else (), strict=False):
        yield _Bundle([each[block] for each in _parameters(attention.kv_down)], readers)


def _stock_bundles(attention: nn.Module, factors_by_id: Mapping[int, Tensor]) -> Iterator[_Bundle]:
    """Yield the bundles of stock MLA: latents under a norm with multipliers, and interleaved rotary pairs."""
    down, up = attention.kv_a_proj_with_mqa, attention.kv_b_proj.weight
    rank = up.shape[1]
    if id(down.weight) in factors_by_id:
        moves = factors_by_id[id(down.weight)][:, 0]
        free = int((moves[:rank] > 0).sum())
        if bool((moves[:free] > 0).all()):
            yield _Bundle([each[:free] for each in _parameters(down)], [up[:, :free]], moves[:free].to(up.device))
    if not getattr(attention.config, "rope_interleave", attention.config.model_type == "deepseek_v2"):
        return
    query = getattr(attention, "q_b_proj", None) or attention.q_proj
    heads = [each.unflatten(0, (-1, attention.qk_head_dim)) for each in _parameters(query)]
    rotated = [each[:, attention.qk_nope_head_dim :].movedim(1, -1) for each in heads]
    if rotated[0].shape[-1]:
        yield _Bundle([each[rank:] for each in _parameters(down)], rotated, shared=2)


def _parameters(projection: nn.Linear) -> list[Tensor]:
    return [projection.weight, *([] if projection.bias is None else [projection.bias])]


def _trains(view: Tensor) -> bool:
    """Return whether the parameter of a view trains; views made under `no_grad` do not require gradients."""
    base = view if view._base is None else view._base
    return base.requires_grad
