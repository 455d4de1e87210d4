"""Latents rescaled before they train, so that one learning rate suits what makes them and what reads them.

A latent is made by a row of the down-projection and read by a column of up-projections; c times the one and 1/c times
the other is the same function. Conversions choose c for their own ends: orthonormal columns in some metric leave rows
of thousandths next to columns of units. Adam moves every entry by about the learning rate, whatever its size, and so
destroys the rows before the columns have noticed. With entries of one size on both sides both move alike.

In MLA classes of families the pairs of the shared rotary key are such numbers too, read by every head's queries, where
they are neighbors. Their latents are only after a norm that does nothing, as conversions make it: another one sees
all latents at once, and none can be rescaled alone.

The factors are powers of two, so that the student computes bit for bit what it did; but for a stock latent that stands
next to a constant channel: the norm over both sees it a little more, by a share of the latent's energy over the
constant's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.training.recording import decoder_of


@dataclass(frozen=True)
class _Bundle:
    """Numbers that are made and read apart from all others.

    Attributes:
        producers: views [r, ...] of weights and biases that make them, the weight first.
        read: views [..., r] of weights that read them.
        factors: [r], by which steps of the makers are smaller; see `surgery.training.entry_factors`.
        shared: adjacent ones that need one scale.
    """

    producers: list[Tensor]
    read: list[Tensor]
    factors: Tensor | float = 1.0
    shared: int = 1

    @property
    def trains(self) -> bool:
        """Return whether both sides train."""
        return bool(self.read) and all(map(_trains, (*self.producers, *self.read)))

    def rescale(self) -> int:
        """Gives both sides entries of one size; returns how many numbers that changes."""
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
    """Rescales latents whose two sides train, in place; returns how many.

    An attention says by `latent_slices` which outputs of its `kv_down` are latents, and by `latent_readers` all that
    reads them; stock MLA is known by its names. Left as they are: latents of which a side does not train and would not
    be written, and those that other layers read too.

    Args:
        factors: of entries that move less than others, or never, by parameter name.
    """
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    factors_by_id = {id_: factors[name] for id_, name in names.items() if name in (factors or {})}
    changed = 0
    for layer in decoder_of(student).layers:
        attention = getattr(layer, "self_attn", None)
        bundles = _stock(attention, factors_by_id) if hasattr(attention, "kv_a_proj_with_mqa") else _own(attention)
        changed += sum(bundle.rescale() for bundle in bundles if bundle.trains)
    return changed


def _own(attention: nn.Module | None) -> Iterator[_Bundle]:
    blocks = getattr(attention, "latent_slices", ())
    for block, readers in zip(blocks, attention.latent_readers() if blocks else (), strict=False):
        yield _Bundle([each[block] for each in _parameters(attention.kv_down)], readers)


def _stock(attention: nn.Module, factors_by_id: Mapping[int, Tensor]) -> Iterator[_Bundle]:
    """Yield the bundles of a family's MLA: latents without a norm but for those that never move, and interleaved rotary
    pairs.

    Makers of latents after a norm that does nothing are held back (`factors_by_id`), all or some.
    """
    down, up = attention.kv_a_proj_with_mqa, attention.kv_b_proj.weight
    rank = up.shape[1]
    if id(down.weight) in factors_by_id:
        moves = factors_by_id[id(down.weight)][:, 0]
        free = int((moves[:rank] > 0).sum())  # what never moves stands after the latents
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
    """Return whether the parameter that a view is of trains; views made without gradients do not know."""
    base = view if view._base is None else view._base
    return base.requires_grad
