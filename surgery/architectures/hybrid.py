"""Full and streaming heads in the custom model class: heads that can stream, config entries and tensors of a layer.

Tensors keep the source's names and shapes; heads are permuted so that full ones come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

from torch import BoolTensor, Tensor

from surgery.architectures.custom_class import layer_entries
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.families.base import ATTENTION_PREFIX, head_shape
from surgery.model.hybrid_entry import HybridEntry
from surgery.model.latent_entry import NORM_OVER_HEADS, LatentEntry
from surgery.model.layer_entry import LayerEntry
from surgery.model.low_rank_entry import Block, LowRankEntry, StreamingBlocks
from surgery.model.streaming_latent_entry import Streaming, StreamingLatentEntry
from surgery.running.layer_stream import source_family
from surgery.transforms.head_order import permute_heads

REASON = "no stock class has full and streaming heads in one layer"


@dataclass(frozen=True)
class Unit:
    """KV heads of one layer that share cached elements, ``width`` per token, by their indices.

    ``blocks`` are the low-rank blocks that they are rebuilt from; empty for other attention.
    """

    heads: tuple[int, ...]
    width: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamableModel:
    """Checkpoint whose heads, equally many in all layers, can become streaming heads, in units by layer."""

    config: dict
    kv_heads: int
    head_dim: int
    units: tuple[tuple[Unit, ...], ...]

    @classmethod
    def of(cls, path: Path, config: dict, loaded) -> StreamableModel:
        """Read a checkpoint's streamable heads; ``loaded`` is its transformers config.

        Raises SurgeryError: its heads cannot stream; the message has the reason and a remedy.
        """
        if config["model_type"] == "deepseek_v3":
            raise SurgeryError.at(
                path,
                "all heads of stock MLA share one latent, so streaming "
                "heads would save no cache; convert its source --to hybrid instead, or --to mla "
                "--carrier own, whose layers can stream as a whole",
            )
        if config.get("kv_cache"):
            raise SurgeryError.at(path, "its KV cache is quantized; convert its source --to hybrid instead")
        if (family := source_family(loaded)).sinks:
            raise SurgeryError.at(path, "streaming heads do not support its learned sinks; convert --to gqa")
        _, kv_heads, head_dim = head_shape(loaded)
        plain, units = SimpleNamespace(**config), []
        for layer, entry in enumerate(layer_entries(config)):
            if entry.streams:
                raise SurgeryError.at(path, f"layer {layer} has streaming heads already; convert its source")
            if entry.quantizes:
                raise SurgeryError.at(path, f"heads of {entry.kind} attention (layer {layer}) cannot stream")
            if isinstance(entry, LatentEntry):
                layer_units = (Unit(tuple(range(kv_heads)), entry.width(plain)),)
            elif isinstance(entry, LowRankEntry):
                if entry.has_window or entry.joined:
                    raise SurgeryError.at(path, f"layer {layer} has a residual window or shared latents")
                layer_units = _units_of_blocks(entry.blocks)
                if len(layer_units) > 1 and config["base_model_type"] in NORM_OVER_HEADS:
                    raise SurgeryError.at(path, f"the key norm of layer {layer} spans all heads")
            else:
                if family.output_gate:
                    raise SurgeryError.at(path, "streaming heads do not support its output gate; convert --to lowrank")
                count = getattr(entry, "kv_heads", kv_heads)
                layer_units = tuple(Unit((head,), 2 * head_dim) for head in range(count))
            units.append(layer_units)
        counts = {sum(len(unit.heads) for unit in layer_units) for layer_units in units}
        if len(counts) > 1:
            raise SurgeryError.at(path, f"layers differ in KV heads, {sorted(counts)}; a pattern needs one number")
        return cls(config, counts.pop(), head_dim, tuple(units))

    @property
    def layers(self) -> int:
        return len(self.units)

    def bytes_at(self, full: BoolTensor, tokens: int, window: int, itemsize: int) -> int:
        """Compute the KV bytes of ``tokens`` tokens with these full heads [L, G]; others cache ``window`` tokens."""
        return sum(
            unit.width * itemsize * (tokens if full[layer, unit.heads[0]] else min(tokens, window))
            for layer, layer_units in enumerate(self.units)
            for unit in layer_units
        )

    def entries(self, plan) -> list[LayerEntry]:
        """Return the layer entries of config.json for a :class:`surgery.heads.plan.HeadPlan`."""
        entries = layer_entries(self.config)
        return [
            entry if plan.full[layer].all() else self._entry(entry, layer, plan) for layer, entry in enumerate(entries)
        ]

    def _entry(self, entry: LayerEntry, layer: int, plan) -> LayerEntry:
        full, window = plan.full[layer], {"sinks": plan.sinks, "recent": plan.recent}
        if isinstance(entry, LatentEntry):
            latent = {field.name: getattr(entry, field.name) for field in fields(entry)}
            return StreamingLatentEntry(**latent, streaming=Streaming(**window))
        if isinstance(entry, LowRankEntry):
            blocks = sorted(block for unit in self.units[layer] if not full[unit.heads[0]] for block in unit.blocks)
            return replace(entry, streaming=StreamingBlocks(tuple(blocks), **window))
        return HybridEntry(
            kv_heads=self.kv_heads,
            full_heads=int(full.sum()),
            **window,
            head_order=tuple(plan.order(layer)),
        )


def moved_names(reader: CheckpointReader, layer: int) -> list[str]:
    """Return the names of a layer's tensors that a permutation of heads may change."""
    prefix = ATTENTION_PREFIX.format(layer=layer)
    moved = ("q_proj.", "k_proj.", "v_proj.", "o_proj.weight", "q_norm.", "k_norm.")
    prefixes = tuple(f"{prefix}{name}" for name in moved)
    return [name for name in reader.names() if name.startswith(prefixes)]


def moved_tensors(reader: CheckpointReader, layer: int, order: list[int]) -> dict[str, Tensor]:
    """Return a layer's tensors with the KV heads in another order, in their own dtype."""
    prefix = ATTENTION_PREFIX.format(layer=layer)
    tensors = {name.removeprefix(prefix): reader.tensor(name) for name in moved_names(reader, layer)}
    return {prefix + name: tensor.contiguous() for name, tensor in permute_heads(tensors, order).items()}


def _units_of_blocks(blocks: Sequence[Block]) -> tuple[Unit, ...]:
    """Group heads that share latent blocks, directly or through other heads."""
    groups: list[tuple[set[int], list[int]]] = []
    for number, block in enumerate(blocks):
        heads, numbers = {*block.keys, *block.values}, [number]
        disjoint = []
        for group_heads, group_blocks in groups:
            if group_heads & heads:
                heads, numbers = heads | group_heads, [*group_blocks, *numbers]
            else:
                disjoint.append((group_heads, group_blocks))
        groups = [*disjoint, (heads, numbers)]
    units = [
        Unit(tuple(sorted(heads)), sum(blocks[number].rank for number in numbers), tuple(sorted(numbers)))
        for heads, numbers in groups
    ]
    return tuple(sorted(units, key=lambda unit: unit.heads))
