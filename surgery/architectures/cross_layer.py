"""Layers that share a cache, in the custom model class: names and shapes of new tensors, and config.json.

All tensors of the source are copied byte for byte; the shared basis is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.architectures.custom_class import own_config
from surgery.checkpoint import TensorSpec
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.cross_layer_entry import GroupEntry
from surgery.model.layer_entry import LayerEntry, StockEntry
from surgery.transforms.cross_layer import SharedBasis

REASON = "no stock class has layers that share a cache"


@dataclass(frozen=True)
class OwnCrossLayer:
    """Writer of layers that share a cache, for :class:`surgery.model.SurgeryForCausalLM`.

    Groups are layer ranges [start, stop), with the config entries of their first layers. ``widths`` are the elements
    that each layer of the source caches per token; layers outside all groups keep their cache.
    """

    groups: tuple[tuple[int, int], ...]
    entries: tuple[GroupEntry, ...]
    widths: tuple[int, ...]
    dtype: torch.dtype

    def config(self, source: dict) -> dict:
        """Return the config.json of the converted model."""
        layers: list[LayerEntry] = [StockEntry()] * len(self.widths)
        for (start, stop), entry in zip(self.groups, self.entries, strict=True):
            for index in range(start, stop):
                layers[index] = replace(entry, index_in_group=index - start)
        return own_config(source, layers)

    def plan(self) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of the new tensors by name."""
        return {
            ATTENTION_PREFIX.format(layer=index) + name: TensorSpec(self.dtype, shape)
            for (start, stop), entry in zip(self.groups, self.entries, strict=True)
            if hasattr(entry, "rank")
            for index in range(start, stop)
            for name, shape in (
                ("basis_down", (entry.rank, self.widths[index])),
                ("basis_up", (self.widths[index], entry.rank)),
            )
        }

    def tensors(self, group: int, basis: SharedBasis, anatomies: Sequence[AttentionAnatomy]) -> dict[str, Tensor]:
        """Return the new tensors of a group of layers with these ``anatomies``, as planned."""
        start = self.groups[group][0]
        result = {}
        for member, (down, up) in enumerate(zip(basis.down, basis.up, strict=True)):
            prefix = ATTENTION_PREFIX.format(layer=start + member)
            result[prefix + "basis_down"] = _stored(anatomies[member], down.mT).mT.to(self.dtype).contiguous()
            result[prefix + "basis_up"] = _stored(anatomies[member], up).to(self.dtype).contiguous()
        return result

    def latent_tensors(self, group: int, basis: SharedBasis, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a group's new tensors for MLA; its caches hold latents times the norms' ``weights`` [r], float64."""
        start = self.groups[group][0]
        result = {}
        for member, (down, up, weight) in enumerate(zip(basis.down, basis.up, weights, strict=True)):
            prefix = ATTENTION_PREFIX.format(layer=start + member)
            unweighted = torch.where(weight == 0, 0, 1 / weight)  # channels of weight 0 are never read
            result[prefix + "basis_down"] = (down * unweighted).to(self.dtype).contiguous()
            result[prefix + "basis_up"] = (up * weight[:, None]).to(self.dtype).contiguous()
        return result


def _stored(anatomy: AttentionAnatomy, rows: Tensor) -> Tensor:
    """Put the key rows of a layer's keys and values [n, r] in the checkpoint's order."""
    keys = anatomy.kv_heads * anatomy.head_dim
    heads = rows[:keys].unflatten(0, (anatomy.kv_heads, anatomy.head_dim))
    return torch.cat([anatomy.stored(heads).flatten(0, 1), rows[keys:]])
