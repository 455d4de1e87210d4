"""MLA in the custom model class with a cache of packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.architectures.own import OwnMLA
from surgery.checkpoint import TensorSpec
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.layer_entry import LayerEntry, StockEntry
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery.model.token_format import Runs
from surgery.model.token_quantizer import TokenQuantizer

QUANTIZER = "quantizer."


@dataclass(frozen=True)
class OwnQuantizedMLA(OwnMLA):
    """Writer of MLA with a cache of packed rows.

    Attributes:
        runs: runs of bit patterns of each layer's latent and rotary key; None for layers that keep their attention.
        first_tokens: number of first tokens that stay in full precision.
        predicts_values: whether shared keys predict values.
    """

    runs: tuple[tuple[Runs, Runs] | None, ...]
    first_tokens: int
    predicts_values: bool = False

    def entries(self) -> list[LayerEntry]:
        return [
            QuantizedLatentEntry(
                kv_lora_rank=rank,
                rope_inv_freq=tuple(inv_freq.tolist()),
                key_norm_eps=self.spec.key_norm_eps,
                latent_runs=runs[0],
                rope_runs=runs[1],
                first_tokens=self.first_tokens,
                predicts_values=self.predicts_values or None,
            )
            if runs
            else StockEntry()
            for rank, inv_freq, runs in zip(self.spec.ranks, self.spec.inv_freq, self.runs, strict=True)
        ]

    def value_width(self, layer: int) -> int:
        return super().value_width(layer) + (2 * len(self.spec.inv_freq[layer]) if self.predicts_values else 0)

    def plan(self, layer: int) -> dict[str, TensorSpec]:
        rank, rope_dim = self.spec.ranks[layer], 2 * len(self.spec.inv_freq[layer])
        specs = quantizer_specs(layer, rank + rope_dim, rank if self.predicts_values else 0)
        return super().plan(layer) | specs


def quantizer_specs(layer: int, channels: int, correcting: int = 0) -> dict[str, TensorSpec]:
    """Return the dtypes and shapes of a layer's `TokenQuantizer`, by name."""
    prefix = ATTENTION_PREFIX.format(layer=layer) + QUANTIZER
    specs = dict.fromkeys((prefix + "mean", prefix + "step"), TensorSpec(torch.float32, (channels,)))
    if correcting:
        specs[prefix + "correction"] = TensorSpec(torch.float32, (correcting, channels - correcting))
    return specs


def quantizer_tensors(layer: int, quantizer: TokenQuantizer) -> dict[str, Tensor]:
    """Return the tensors of a layer's quantizer, as planned."""
    prefix = ATTENTION_PREFIX.format(layer=layer) + QUANTIZER
    names = ("mean", "step", "correction") if quantizer.correcting else ("mean", "step")
    return {prefix + name: getattr(quantizer, name).cpu() for name in names}
