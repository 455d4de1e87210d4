"""MLA with fewer latents in the source's class: tensors and config.json fields that change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader, TensorSpec
from surgery.families.base import ATTENTION_PREFIX, MTP_LAYERS, is_mtp_layer
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.families.latent_family import DOWN, NORM, UP


@dataclass(frozen=True)
class SmallerLatents:
    """Writer of MLA with a smaller rank, in the source's class.

    Attributes:
        reader: of the source.
        layers: number of layers, without MTP layers.
        rank: new rank of every layer.
        rope_dim: rotary dimensions, which do not change.
    """

    reader: CheckpointReader
    layers: int
    rank: int
    rope_dim: int

    @property
    def model_type(self) -> str:
        return self.reader.config["model_type"]

    def config(self) -> dict[str, Any]:
        """Return the source's config.json with the new rank."""
        config = {**self.reader.config, "kv_lora_rank": self.rank}
        return {**config, MTP_LAYERS: 0} if config.get(MTP_LAYERS) else config

    def plan(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of the output checkpoint's tensors, from those of the source."""
        changed = {
            f"{ATTENTION_PREFIX.format(layer=layer)}{module}.{kind}": shape
            for layer in range(self.layers)
            for (module, kind), shape in self._shapes(tensors, layer).items()
        }
        return {name: TensorSpec(spec.dtype, changed.get(name, spec.shape)) for name, spec in tensors.items()}

    def reasons(self) -> list[str]:
        """Return the reason for the class, and a note on MTP layers that are left out."""
        messages = ["the source's own class holds the new rank"]
        if further := {name.split(".")[2] for name in self.reader.names() if is_mtp_layer(name, self.layers)}:
            messages.append(f"MTP layers are left out ({len(further)})")
        return messages

    def tensors(self, layer: int, smaller: LatentAnatomy) -> dict[str, Tensor]:
        """Return a layer's new tensors by their full names, in the source's dtypes.

        The norm's weight is a power of two, which no dtype rounds, near the source's, so that cached values keep their
        size.
        """
        rank, prefix = smaller.rank, ATTENTION_PREFIX.format(layer=layer)
        typical = float(self.reader.tensor(f"{prefix}{NORM}.weight").double().abs().mean())
        weight = 2.0 ** round(math.log2(typical)) if typical else 1.0

        def stored(rows: Tensor) -> Tensor:
            rotated = rows[rank:] if smaller.order is None else rows[rank:][smaller.order.argsort()]
            return torch.cat([rows[:rank], rotated])

        result = {
            f"{DOWN}.weight": stored(smaller.down),
            f"{NORM}.weight": torch.full((rank,), weight),
            f"{UP}.weight": smaller.up.flatten(0, 1) / weight,
        }
        if smaller.down_bias is not None:
            result[f"{DOWN}.bias"] = stored(smaller.down_bias)
        return {
            prefix + name: tensor.to(self.reader.info(prefix + name).dtype).contiguous()
            for name, tensor in result.items()
        }

    def _shapes(self, tensors: Mapping[str, TensorSpec], layer: int) -> dict[tuple[str, str], tuple[int, ...]]:
        prefix, width = ATTENTION_PREFIX.format(layer=layer), self.rank + self.rope_dim
        return {
            (DOWN, "weight"): (width, *tensors[f"{prefix}{DOWN}.weight"].shape[1:]),
            (DOWN, "bias"): (width,),
            (NORM, "weight"): (self.rank,),
            (UP, "weight"): (tensors[f"{prefix}{UP}.weight"].shape[0], self.rank),
        }
