"""MLA in the custom model class, for models that stock ``deepseek_v3`` cannot hold.

The source's query projection and norm are copied byte for byte; the latent form of
:mod:`surgery.transforms.latent_layer` is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from surgery.architectures.custom_class import own_config
from surgery.architectures.spec import MLASpec
from surgery.checkpoint import TensorSpec
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.latent_entry import LatentEntry
from surgery.model.layer_entry import LayerEntry, StockEntry
from surgery.transforms.latent_layer import LatentLayer


@dataclass(frozen=True)
class OwnMLA:
    """Writer of MLA for :class:`surgery.model.SurgeryForCausalLM`."""

    spec: MLASpec

    def config(self, source: dict) -> dict:
        """Return the config.json of the converted model."""
        return own_config(source, self.entries())

    def entries(self) -> list[LayerEntry]:
        """Return the layer entries of config.json."""
        spec = self.spec
        return [
            LatentEntry(kv_lora_rank=rank, rope_inv_freq=tuple(inv_freq.tolist()), key_norm_eps=spec.key_norm_eps)
            if rank
            else StockEntry()
            for rank, inv_freq in zip(spec.ranks, spec.inv_freq, strict=True)
        ]

    def copied(self, names: list[str]) -> list[str]:
        """Return the source's attention tensors of a layer that are copied unchanged."""
        prefixes = ["q_proj.", "q_norm.", "o_proj.bias", "sinks"]
        if self.spec.key_norm_eps is not None:
            prefixes.append("k_proj.")  # computes the key norm's inverse RMS exactly
        return [name for name in names if name.rpartition("self_attn.")[2].startswith(tuple(prefixes))]

    def value_width(self, layer: int) -> int:
        """Return the number of channels from which a layer reads values."""
        return self.spec.ranks[layer]

    def plan(self, layer: int) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of a layer's new tensors by name."""
        spec, rank = self.spec, self.spec.ranks[layer]
        width = rank + 2 * len(spec.inv_freq[layer])
        shapes = {
            "kv_down.weight": (width, spec.hidden),
            "query_up": (spec.heads, spec.head_dim, width),
            "value_up": (spec.heads, spec.value_dim, self.value_width(layer)),
            "o_proj.weight": (spec.hidden, spec.heads * spec.value_dim),
        }
        if spec.latent_bias:
            shapes["kv_down.bias"] = (width,)
        prefix = ATTENTION_PREFIX.format(layer=layer)
        return {prefix + name: TensorSpec(spec.dtype, shape) for name, shape in shapes.items()}

    def tensors(self, layer: int, converted: LatentLayer) -> dict[str, Tensor]:
        """Return a layer's new tensors, as planned."""
        spec, order = self.spec, converted.neighboring()
        factor = converted.source.rope_factor**2  # the class applies the rest of the scale
        result = {
            "kv_down.weight": converted.down[order],
            "query_up": converted.source.stored(converted.query_up[..., order]) * factor,
            "value_up": converted.value_up[..., order[: converted.value_up.shape[-1]]],
            "o_proj.weight": converted.o.flatten(1),
        }
        if spec.latent_bias:
            result["kv_down.bias"] = converted.down_bias[order]
        prefix = ATTENTION_PREFIX.format(layer=layer)
        return {prefix + name: tensor.to(spec.dtype).contiguous() for name, tensor in result.items()}
