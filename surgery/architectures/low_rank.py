"""Low-rank keys and values in the custom model class: names and shapes of new tensors, and config.json.

The source's biases and norms are copied byte for byte. Query and output projections may be refitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.architectures.custom_class import own_config
from surgery.architectures.own_quantized import quantizer_specs, quantizer_tensors
from surgery.checkpoint import TensorSpec
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.layer_entry import StockEntry
from surgery.model.low_rank_entry import Block, LowRankEntry
from surgery.model.quantized_low_rank_entry import QuantizedLowRankEntry
from surgery.model.token_format import Runs
from surgery.model.token_quantizer import TokenQuantizer
from surgery.transforms.low_rank_layer import LowRankLayer

REASON = "no stock class rebuilds keys and values from latents"


@dataclass(frozen=True)
class OwnLowRank:
    """Writer of low-rank layers for :class:`surgery.model.SurgeryForCausalLM`.

    All layers have the shapes of ``anatomy``; those that keep their attention have no blocks. ``sinks`` and ``window``
    are full-precision tokens.
    """

    anatomy: AttentionAnatomy
    blocks: tuple[tuple[Block, ...], ...]
    sinks: int = 0
    window: int = 0

    has_bias: ClassVar[bool] = False

    @property
    def kept(self) -> frozenset[int]:
        """Layers that keep their attention."""
        return frozenset(layer for layer, blocks in enumerate(self.blocks) if not blocks)

    def rank(self, layer: int) -> int:
        """Return the number of latents that a layer caches per token."""
        return sum(block.rank for block in self.blocks[layer])

    def shared_rank(self, layer: int) -> int:
        """Return the number of latents of earlier layers that a layer reads."""
        return 0

    def config(self, source: dict) -> dict:
        """Return the config.json of the converted model."""
        layers = range(len(self.blocks))
        return own_config(source, [StockEntry() if layer in self.kept else self.entry(layer) for layer in layers])

    def entry(self, layer: int) -> LowRankEntry:
        """Return the config entry of a converted layer."""
        return LowRankEntry(blocks=self.blocks[layer], sinks=self.sinks, window=self.window)

    def copied(self, names: Sequence[str]) -> list[str]:
        """Return the source's attention tensors of a layer that are copied unchanged."""
        prefixes = "q_proj.bias", "q_norm.", "k_norm.", "o_proj.bias", "sinks"
        prefixes += ("k_proj.", "v_proj.") if self.window else ()
        return [name for name in names if name.rpartition("self_attn.")[2].startswith(prefixes)]

    def plan(self, layer: int) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of a layer's new tensors by name."""
        anatomy = self.anatomy
        shapes = {
            "q_proj.weight": tuple(anatomy.stored_queries()[0].shape),
            "kv_down.weight": (self.rank(layer), anatomy.hidden),
            "o_proj.weight": (anatomy.hidden, anatomy.heads * anatomy.value_dim),
        }
        for number, block in enumerate(self.blocks[layer]):
            width = self.shared_rank(layer) + block.rank
            for kind, heads, dim in (("key", block.keys, anatomy.head_dim), ("value", block.values, anatomy.value_dim)):
                if heads:
                    shapes[f"{kind}_up.{number}"] = (len(heads) * dim, width)
        if anatomy.k_bias is not None or self.has_bias:
            shapes["key_bias"] = (anatomy.kv_heads * anatomy.head_dim,)
        if anatomy.v_bias is not None or self.has_bias:
            shapes["value_bias"] = (anatomy.kv_heads * anatomy.value_dim,)
        prefix = ATTENTION_PREFIX.format(layer=layer)
        return {prefix + name: TensorSpec(anatomy.q.dtype, shape) for name, shape in shapes.items()}

    def tensors(self, layer: int, converted: LowRankLayer) -> dict[str, Tensor]:
        """Return a layer's new tensors, as planned."""
        source, shared = converted.source, converted.shared
        result = {
            "q_proj.weight": source.stored_queries()[0],
            "kv_down.weight": converted.down,
            "o_proj.weight": source.o.flatten(1),
        }
        start = shared
        for number, block in enumerate(converted.blocks):
            columns = [*range(shared), *range(start, start + block.rank)]
            start += block.rank
            for kind, heads, up in (
                ("key", block.keys, source.stored(converted.key_up)),
                ("value", block.values, converted.value_up),
            ):
                if heads:
                    result[f"{kind}_up.{number}"] = up[list(heads)].flatten(0, 1)[:, columns]
        if source.k_bias is not None:
            result["key_bias"] = source.stored(source.k_bias).flatten()
        if source.v_bias is not None:
            result["value_bias"] = source.v_bias.flatten()
        prefix = ATTENTION_PREFIX.format(layer=layer)
        return {prefix + name: tensor.to(self.anatomy.q.dtype).contiguous() for name, tensor in result.items()}


@dataclass(frozen=True, kw_only=True)
class OwnQuantizedLowRank(OwnLowRank):
    """Writer of low-rank layers, alone or in a cascade, with a cache of packed rows.

    Attributes:
        shared_layers: number of preceding layers whose latents each layer reads.
        runs: runs of bit patterns of each layer's latents; empty for a layer that keeps its attention.
        first_tokens: number of first tokens whose latents stay in full precision.
    """

    shared_layers: tuple[int, ...]
    runs: tuple[Runs, ...]
    first_tokens: int

    has_bias = True

    def shared_rank(self, layer: int) -> int:
        return sum(self.rank(other) for other in range(layer - self.shared_layers[layer], layer))

    def entry(self, layer: int) -> QuantizedLowRankEntry:
        return QuantizedLowRankEntry(
            blocks=self.blocks[layer],
            shared_layers=self.shared_layers[layer],
            shared_rank=self.shared_rank(layer),
            latent_runs=self.runs[layer],
            first_tokens=self.first_tokens,
        )

    def plan(self, layer: int) -> dict[str, TensorSpec]:
        rank, shared = self.rank(layer), self.shared_rank(layer)
        specs = super().plan(layer) | quantizer_specs(layer, rank)
        if shared:
            prefix = ATTENTION_PREFIX.format(layer=layer)
            specs[f"{prefix}shared_down.weight"] = TensorSpec(self.anatomy.q.dtype, (rank, shared))
        return specs

    def quantized_tensors(self, layer: int, converted: LowRankLayer, quantizer: TokenQuantizer) -> dict[str, Tensor]:
        """Return a layer's new tensors, as planned."""
        tensors = self.tensors(layer, converted.to("cpu", torch.float64)) | quantizer_tensors(layer, quantizer)
        if converted.shared_down is not None:
            name = f"{ATTENTION_PREFIX.format(layer=layer)}shared_down.weight"
            tensors[name] = converted.shared_down.to("cpu", self.anatomy.q.dtype).contiguous()
        return tensors
