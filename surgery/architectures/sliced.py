"""Slicing of a converted checkpoint to fewer latents: rows and columns of its tensors, and config.json.

Conversions sort the latents of a block by importance (nested ranks, MatryoshkaKV, arXiv:2410.14731). Slicing changes no
value, except for the factor of the norm in a stock class with a constant channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from surgery.architectures import deepseek_v3
from surgery.architectures.custom_class import layer_entries
from surgery.architectures.neutral_norm import NeutralNorm, constant_norm, recognized_norm
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
    """Slice of a tensor: indices to keep along one dimension, and a factor on the slice."""

    dim: int
    kept: tuple[int, ...]
    factor: float = 1.0

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice of a tensor, in its dtype."""
        part = tensor.index_select(self.dim, torch.tensor(self.kept))
        return part if self.factor == 1.0 else (part.double() * self.factor).to(part.dtype)

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the dtype and shape of the slice."""
        shape = list(spec.shape)
        shape[self.dim] = len(self.kept)
        return TensorSpec(spec.dtype, tuple(shape))


@dataclass(frozen=True)
class LatentModel:
    """Checkpoint whose attention caches latents: the custom model class, or stock ``deepseek_v3``, which has a norm."""

    config: dict
    norm: NeutralNorm | None

    @classmethod
    def of(cls, reader: CheckpointReader) -> LatentModel:
        """Read the kind of latents of a checkpoint.

        Raises SurgeryError: it has no latents that can be sliced; the message has the reason and a remedy.
        """
        path, config = reader.path, reader.config
        kind = config.get("model_type")
        if kind == deepseek_v3.MODEL_TYPE:
            return cls(config, _stock_norm(path, reader))
        if kind != "surgery":
            raise SurgeryError.at(
                path, f"model_type {kind!r} has no latents to slice; convert it with --to lowrank or --to mla"
            )
        if config.get("kv_cache"):
            raise SurgeryError.at(path, "its KV cache is quantized; slice its source, then quantize")
        for index, entry in enumerate(layer_entries(config)):
            if not entry.ranks or entry.quantizes:
                named_kind = entry.kind or "the family's own"
                raise SurgeryError.at(
                    path,
                    f"layer {index} has {named_kind} attention, without ordered latents; convert its "
                    "source again with a smaller --kv-ratio",
                )
        return cls(config, None)

    @property
    def stock(self) -> bool:
        """True for a stock transformers class."""
        return self.norm is not None

    @cached_property
    def entries(self) -> list[LayerEntry]:
        """Config entries of all layers, for the custom model class."""
        return layer_entries(self.config)

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def ranks(self) -> Ranks:
        if self.stock:
            return ((self.config["kv_lora_rank"] - self.norm.extra,),) * self.layers
        return tuple(entry.ranks for entry in self.entries)

    def rope_dim(self, layer: int) -> int:
        """Return the rotary dimensions that a layer caches per token next to its latents."""
        if self.stock:
            return self.config["qk_rope_head_dim"]
        return getattr(self.entries[layer], "rope_dim", 0)

    def fixed(self, layer: int) -> int:
        """Return the elements that a layer caches per token in addition to its latents."""
        if self.stock:
            return self.norm.extra + self.rope_dim(layer)
        entry = self.entries[layer]
        return entry.width(SimpleNamespace(**self.config)) - sum(entry.ranks)

    def sliced(self, ranks: Ranks) -> LatentModel:
        """Return the model with the first ``ranks`` latents of each block.

        Raises SurgeryError: the stock class has one rank for all layers.
        """
        if self.stock:
            if len(set(ranks)) > 1:
                raise SurgeryError(f"stock {deepseek_v3.MODEL_TYPE} needs one rank for all layers, not {ranks}")
            ((rank,), *_) = ranks
            norm = constant_norm(rank) if self.norm.extra else self.norm
            return LatentModel({**self.config, "kv_lora_rank": rank + norm.extra}, norm)
        layers = []
        for entry, new_ranks in zip(self.entries, ranks, strict=True):
            if isinstance(entry, LatentEntry):
                layers.append(replace(entry, kv_lora_rank=new_ranks[0]))
                continue
            blocks = tuple(replace(block, rank=rank) for block, rank in zip(entry.blocks, new_ranks, strict=True))
            layer = len(layers)
            shared_rank = sum(sum(other) for other in ranks[layer - entry.shared_layers : layer])
            layers.append(replace(entry, blocks=blocks, shared_rank=shared_rank))
        return LatentModel({**self.config, "attention_layers": [entry.to_entry() for entry in layers]}, None)

    def kept_rows(self, layer: int, ranks: Ranks) -> tuple[int, ...]:
        """Return the rows of a layer's down projection that a slice keeps, rotary ones included."""
        return self.cuts(layer, ranks)[self.down_name + ".weight"].kept

    @property
    def down_name(self) -> str:
        """Name of the projection whose first outputs are the latents."""
        return "kv_a_proj_with_mqa" if self.stock else "kv_down"

    def cuts(self, layer: int, ranks: Ranks) -> dict[str, Cut]:
        """Return the cuts of a layer's attention tensors by name within the layer; a tensor may be absent."""
        if self.stock:
            return self._stock_cuts(layer, ranks)
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
        earlier = slice(layer - self.entries[layer].shared_layers, layer)
        before = [rank for other in self.ranks[earlier] for rank in other]
        shared = _first_indices(before, [rank for other in ranks[earlier] for rank in other])
        cuts = {"kv_down.weight": Cut(0, _first_indices(self.ranks[layer], ranks[layer]))}
        for number, rank in enumerate(ranks[layer]):
            columns = (*shared, *range(sum(before), sum(before) + rank))
            cuts |= {f"{kind}_up.{number}": Cut(1, columns) for kind in ("key", "value")}
        return cuts

    def _stock_cuts(self, layer: int, ranks: Ranks) -> dict[str, Cut]:
        width, new = self.config["kv_lora_rank"], self.sliced(ranks).norm
        latent_rows = (*range(ranks[layer][0]), *range(width - self.norm.extra, width))
        rows = (*latent_rows, *range(width, width + self.rope_dim(layer)))
        return {
            "kv_a_proj_with_mqa.weight": Cut(0, rows),
            "kv_a_proj_with_mqa.bias": Cut(0, rows),
            "kv_a_layernorm.weight": Cut(0, latent_rows, new.weight / self.norm.weight),
            "kv_b_proj.weight": Cut(1, latent_rows, self.norm.gain / new.gain),
        }


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


def _stock_norm(path: Path, reader: CheckpointReader) -> NeutralNorm:
    """Return the neutral norm of a stock checkpoint's latents.

    Raises SurgeryError: a latent norm is real, as in DeepSeek's own models, or norms differ between layers.
    """
    norms, width = set(), reader.config["kv_lora_rank"]
    for layer in range(reader.config["num_hidden_layers"]):
        prefix = ATTENTION_PREFIX.format(layer=layer)
        bias = prefix + "kv_a_proj_with_mqa.bias"
        weight = reader.tensor(prefix + "kv_a_layernorm.weight")
        norms.add(recognized_norm(weight, reader.tensor(bias)[:width] if bias in reader else None))
    if len(norms) != 1 or None in norms:
        raise SurgeryError.at(
            path,
            "its latents have a norm over all of them, so none can be dropped; only deepseek_v3 "
            "checkpoints made by surgery convert --to mla can be sliced",
        )
    return norms.pop()
