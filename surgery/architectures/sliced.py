"""Slicing of a converted checkpoint to fewer latents: rows and columns of its tensors, and config.json.

Conversions sort the latents of a block by importance (nested ranks, MatryoshkaKV, arXiv:2410.14731). Slicing changes no
value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace

import torch
from torch import Tensor

from surgery.architectures.custom_class import MODEL_TYPE, layer_entries
from surgery.checkpoint import CheckpointReader, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.latent_entry import LatentEntry
from surgery.model.layer_entry import LayerEntry
from surgery.model.low_rank_entry import LowRankEntry

Ranks = tuple[tuple[int, ...], ...]
"""Number of latents in each block of each layer; one block per layer except for block-wise low rank."""


@dataclass(frozen=True)
class Cut:
    """Slice of a tensor: indices to keep along one dimension."""

    dim: int
    kept: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice of a tensor, in its dtype."""
        return tensor.index_select(self.dim, torch.tensor(self.kept))

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the dtype and shape of the slice."""
        shape = list(spec.shape)
        shape[self.dim] = len(self.kept)
        return TensorSpec(spec.dtype, tuple(shape))


@dataclass(frozen=True)
class LatentModel:
    """Checkpoint of the custom model class whose attention caches latents."""

    config: dict

    @classmethod
    def of(cls, reader: CheckpointReader) -> LatentModel:
        """Read the kind of latents of a checkpoint.

        Raises SurgeryError: it has no latents that can be sliced; the message has the reason and a remedy.
        """
        path, config = reader.path, reader.config
        kind = config.get("model_type")
        if kind != MODEL_TYPE:
            raise SurgeryError.at(
                path,
                f"model_type {kind!r} cannot be sliced; convert the source with --to lowrank, or with --to mla "
                "--carrier own and --kv-lora-rank",
            )
        if config.get("kv_cache"):
            raise SurgeryError.at(path, "its KV cache is quantized; slice its source, then quantize")
        for index, entry in enumerate(layer_entries(config)):
            if entry.quantizes or entry.joined:
                raise SurgeryError.at(
                    path,
                    "caches in bits and cascades cannot be sliced; convert the source again with a smaller --kv-ratio",
                )
            if not entry.ranks:
                named_kind = entry.kind or "the family's own"
                raise SurgeryError.at(
                    path,
                    f"layer {index} has {named_kind} attention, without ordered latents; convert its "
                    "source again with a smaller --kv-ratio",
                )
        return cls(config)

    @cached_property
    def entries(self) -> list[LayerEntry]:
        """Config entries of all layers."""
        return layer_entries(self.config)

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def ranks(self) -> Ranks:
        return tuple(entry.ranks for entry in self.entries)

    def rope_dim(self, layer: int) -> int:
        """Return the rotary dimensions that a layer caches per token next to its latents."""
        return getattr(self.entries[layer], "rope_dim", 0)

    def fixed(self, layer: int) -> int:
        """Return the elements that a layer caches per token in addition to its latents."""
        entry = self.entries[layer]
        return entry.width(SimpleNamespace(**self.config)) - sum(entry.ranks)

    def sliced(self, ranks: Ranks) -> LatentModel:
        """Return the model with the first ``ranks`` latents of each block."""
        layers = []
        for entry, new_ranks in zip(self.entries, ranks, strict=True):
            if isinstance(entry, LatentEntry):
                layers.append(replace(entry, kv_lora_rank=new_ranks[0]))
                continue
            blocks = tuple(replace(block, rank=rank) for block, rank in zip(entry.blocks, new_ranks, strict=True))
            layers.append(replace(entry, blocks=blocks))
        return LatentModel({**self.config, "attention_layers": [entry.to_entry() for entry in layers]})

    def kept_rows(self, layer: int, ranks: Ranks) -> tuple[int, ...]:
        """Return the rows of a layer's down projection that a slice keeps, rotary ones included."""
        return self.cuts(layer, ranks)["kv_down.weight"].kept

    def cuts(self, layer: int, ranks: Ranks) -> dict[str, Cut]:
        """Return the cuts of a layer's attention tensors by name within the layer; a tensor may be absent."""
        if isinstance(self.entries[layer], LowRankEntry):
            return self._low_rank_cuts(layer, ranks)
        ((rank,), (new_rank,)) = self.ranks[layer], ranks[layer]
        latents = tuple(range(new_rank))
        rows = (*latents, *range(rank, rank + self.rope_dim(layer)))
        return {
            "kv_down.weight": Cut(0, rows),
            "kv_down.bias": Cut(0, rows),
            "query_up": Cut(2, rows),
            "value_up": Cut(2, latents),
        }

    def _low_rank_cuts(self, layer: int, ranks: Ranks) -> dict[str, Cut]:
        cuts = {"kv_down.weight": Cut(0, _first_indices(self.ranks[layer], ranks[layer]))}
        for number, rank in enumerate(ranks[layer]):
            cuts |= {f"{kind}_up.{number}": Cut(1, tuple(range(rank))) for kind in ("key", "value")}
        return cuts


def planned_tensors(reader: CheckpointReader, model: LatentModel, ranks: Ranks) -> dict[str, TensorSpec]:
    """Return the dtypes and shapes of all tensors of the sliced checkpoint, in the order of the whole one."""
    plan = {name: TensorSpec(reader.info(name).dtype, reader.info(name).shape) for name in reader.names()}
    for layer in range(model.layers):
        for name, cut in _cuts_by_name(reader, model, layer, ranks).items():
            plan[name] = cut.spec(plan[name])
    return plan


def sliced_tensors(reader: CheckpointReader, model: LatentModel, layer: int, ranks: Ranks) -> dict[str, Tensor]:
    """Return a layer's tensors that slicing changes, in their own dtype."""
    cuts = _cuts_by_name(reader, model, layer, ranks)
    return {name: cut.of(reader.tensor(name)).contiguous() for name, cut in cuts.items()}


def _cuts_by_name(reader: CheckpointReader, model: LatentModel, layer: int, ranks: Ranks) -> dict[str, Cut]:
    prefix = ATTENTION_PREFIX.format(layer=layer)
    return {prefix + name: cut for name, cut in model.cuts(layer, ranks).items() if prefix + name in reader}


def _first_indices(sizes: Iterable[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the first ``counts`` elements of each run, for adjacent runs of these sizes."""
    indices, start = [], 0
    for size, count in zip(sizes, counts, strict=True):
        indices += range(start, start + count)
        start += size
    return tuple(indices)
