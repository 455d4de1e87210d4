"""Declaration of an MLA model family, and reading of a layer's anatomy from its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.families.anatomy import HeadNorm
from surgery.families.base import ATTENTION_PREFIX, Family, Rotation, shaped_tensors
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.families.rope import STATIC_ROPE_TYPES, half_split_order, rope_frequencies

LATENT_EPS = 1e-6
"""Eps of the latent norms in transformers' MLA classes, which ignore ``rms_norm_eps`` there."""

DOWN, NORM, UP = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
"""Modules that a conversion to a smaller latent changes."""


def mla_scale(config) -> float:
    """Return DeepSeek's scale of attention logits: ``(nope + rope) ** -0.5 * mscale ** 2`` with YaRN's mscale."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    factor, mscale = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    if rope.get("rope_type", "default") == "default" or not mscale or factor <= 1:
        return scale
    return scale * (0.1 * mscale * math.log(factor) + 1) ** 2


@dataclass(frozen=True)
class LatentFamily(Family):
    """Family whose attention is MLA under DeepSeek's names.

    ``neighbors`` returns from a config whether rotary pairs are (2 i, 2 i + 1); ``inside`` is the vision-language
    ``model_type`` that transformers' auto classes need to load it.
    """

    scale: Callable[[object], float] = mla_scale
    neighbors: Callable[[object], bool] = lambda config: bool(config.rope_interleave)
    inside: str | None = None

    def shape(self, config) -> tuple[int, int, int]:
        """Return query heads, one KV head, and a head dimension whose keys and values are as wide as the MLA cache."""
        return config.num_attention_heads, 1, (config.kv_lora_rank + config.qk_rope_head_dim) // 2

    def attention_names(self, reader, layer: int) -> list[str]:
        """Return the names of a layer's attention tensors, as :meth:`Family.attention_names` does."""
        prefix = ATTENTION_PREFIX.format(layer=layer)
        names = [name for name in reader.names() if name.startswith(prefix)]
        present = {name.removeprefix(prefix) for name in names}
        required = {f"{module}.weight" for module in (DOWN, NORM, UP, "o_proj")}
        dense, low_rank = {"q_proj.weight"}, {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"}
        required |= low_rank if reader.config.get("q_lora_rank") is not None else dense
        allowed_names = required | {f"{module}.bias" for module in (DOWN, "q_a_proj", "o_proj")}
        if unknown := sorted(present - allowed_names - {"rotary_emb.inv_freq"}):
            raise SurgeryError(f"{prefix}{unknown[0]}: unexpected tensor in the MLA of family {self.model_type!r}")
        if missing := sorted(required - present):
            raise SurgeryError(f"{prefix}{missing[0]}: missing from the checkpoint")
        return names

    def anatomy(self, reader, config, layer: int) -> LatentAnatomy:
        """Read the anatomy of one layer on the CPU, in the checkpoint's dtype; ``up`` is float64.

        Raises SurgeryError: a tensor does not fit the config.
        """
        tensor = shaped_tensors(reader, layer, self.attention_names(reader, layer))
        heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        rotation = self.rotation(config, layer)

        def half_split(rows: Tensor | None, dim: int, start: int) -> Tensor | None:
            """Put the rotary rows, from ``start`` on, in half-split order."""
            if rows is None or rotation.order is None:
                return rows
            return rows.index_select(dim, torch.cat([torch.arange(start), start + rotation.order]))

        low_rank = getattr(config, "q_lora_rank", None)
        query = tensor(
            "q_proj.weight" if low_rank is None else "q_b_proj.weight", heads, nope + rope, low_rank or hidden
        )
        norm = None if low_rank is None else HeadNorm(tensor("q_a_layernorm.weight", low_rank), LATENT_EPS)
        up = tensor(f"{UP}.weight", heads, nope + value, rank).double()
        return LatentAnatomy(
            q=half_split(query, 1, nope),
            q_down=None if low_rank is None else tensor("q_a_proj.weight", low_rank, hidden),
            q_down_bias=None if low_rank is None else tensor("q_a_proj.bias", low_rank),
            q_norm=norm,
            down=half_split(tensor(f"{DOWN}.weight", rank + rope, hidden), 0, rank),
            down_bias=half_split(tensor(f"{DOWN}.bias", rank + rope), 0, rank),
            up=up * tensor(f"{NORM}.weight", rank).double(),
            o=tensor("o_proj.weight", hidden, heads, value),
            o_bias=tensor("o_proj.bias", hidden),
            inv_freq=rotation.inv_freq,
            scale=self.scale(config),
            eps=LATENT_EPS,
            unrotated_dim=nope,
            order=rotation.order,
            rope_factor=rotation.factor,
        )

    def rotation(self, config, layer: int) -> Rotation:
        """Return the RoPE of the rotary dimensions.

        The conversion leaves them unchanged, so longrope is supported: its frequencies may change in texts longer than
        those of calibration.
        """
        rope = config.qk_rope_head_dim
        partial = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0  # a share of the whole head
        width = rope + config.qk_nope_head_dim if partial else rope
        inv_freq, factor = rope_frequencies(config, width, kinds=(*STATIC_ROPE_TYPES, "longrope"))
        return Rotation(inv_freq, factor, half_split_order(rope, rope, interleaved=self.neighbors(config)))
