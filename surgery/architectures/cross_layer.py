"""Layers that share a cache, in the project's own model class: names, shapes and config of what is written.

All tensors of the source are kept, byte for byte; a shared basis stands next to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.architectures.own_class import own_config
from surgery.checkpoint import TensorSpec
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.cross_layer_entry import GroupEntry
from surgery.model.layer_entry import LayerEntry, StockEntry
from surgery.transforms.cross_layer import SharedBasis

REASON = "no stock class has layers that share a cache"


@dataclass(frozen=True)
class OwnCrossLayer:
    """Writes one conversion for :class:`surgery.model.SurgeryForCausalLM`.

    Attributes:
        groups: first layer of each group, and the one after its last.
        entries: of the first layer of each group.
        layers: of the model; those in no group keep their own attention and cache.
        width: numbers that a layer of the source caches per token.
        dtype: of the new tensors.
    """

    groups: tuple[tuple[int, int], ...]
    entries: tuple[GroupEntry, ...]
    layers: int
    width: int
    dtype: torch.dtype

    def config(self, source: dict) -> dict:
        """The config.json of the converted model."""
        layers: list[LayerEntry] = [StockEntry()] * self.layers
        for (start, stop), entry in zip(self.groups, self.entries, strict=True):
            for index in range(start, stop):
                layers[index] = replace(entry, place=index - start)
        return own_config(source, layers)

    def plan(self) -> dict[str, TensorSpec]:
        """Names, dtypes and shapes of the new tensors."""
        return {
            ATTENTION_PREFIX.format(layer=index) + name: TensorSpec(self.dtype, shape)
            for (start, stop), entry in zip(self.groups, self.entries, strict=True)
            if hasattr(entry, "rank")
            for index in range(start, stop)
            for name, shape in (
                ("basis_down", (entry.rank, self.width)),
                ("basis_up", (self.width, entry.rank)),
            )
        }

    def tensors(self, group: int, basis: SharedBasis, anatomies: Sequence[AttentionAnatomy]) -> dict[str, Tensor]:
        """A group's new tensors, as planned; ``anatomies`` of its layers."""
        start = self.groups[group][0]
        result = {}
        for place, (down, up) in enumerate(zip(basis.down, basis.up, strict=True)):
            prefix = ATTENTION_PREFIX.format(layer=start + place)
            result[prefix + "basis_down"] = _stored(anatomies[place], down.mT).mT.to(self.dtype).contiguous()
            result[prefix + "basis_up"] = _stored(anatomies[place], up).to(self.dtype).contiguous()
        return result

    def latent_tensors(self, group: int, basis: SharedBasis, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tensors for MLA, whose caches hold latents times the ``weights`` [r] of their norms; float64."""
        start = self.groups[group][0]
        result = {}
        for place, (down, up, weight) in enumerate(zip(basis.down, basis.up, weights, strict=True)):
            prefix = ATTENTION_PREFIX.format(layer=start + place)
            unweighted = torch.where(weight == 0, 0, 1 / weight)  # what has no weight is never read
            result[prefix + "basis_down"] = (down * unweighted).to(self.dtype).contiguous()
            result[prefix + "basis_up"] = (up * weight[:, None]).to(self.dtype).contiguous()
        return result


def _stored(anatomy: AttentionAnatomy, rows: Tensor) -> Tensor:
    """Rows [n, r] of a layer's keys and values, keys in the checkpoint's order."""
    keys = anatomy.kv_heads * anatomy.head_dim
    heads = rows[:keys].unflatten(0, (anatomy.kv_heads, anatomy.head_dim))
    return torch.cat([anatomy.stored(heads).flatten(0, 1), rows[keys:]])
