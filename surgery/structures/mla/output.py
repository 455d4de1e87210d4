"""Output of an MLA conversion: its target class, shapes, and cached elements next to latents and rotated keys."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.architectures.choose import Carrier, choose_carrier
from surgery.architectures.deepseek_v3 import StockMLA, obstacles
from surgery.architectures.own import OwnMLA
from surgery.architectures.spec import MLASpec
from surgery.checkpoint import TensorSpec
from surgery.checkpoint.carry_over import EMBEDDING, HEAD
from surgery.common.errors import SurgeryError
from surgery.engines.limits import MLALimits, mla_limits
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.rope import unchanged_length
from surgery.running.source import Source
from surgery.structures.base import replanned_tensors
from surgery.structures.kept_layers import kept_layers
from surgery.structures.mla.plans import MLAPlan
from surgery.structures.mla.settings import ConvertSettings


def refuse_longrope(opened: Source) -> None:
    """Raise SurgeryError if rotary frequencies change with the length of the text."""
    if unchanged_length(opened.config) is not None:
        raise SurgeryError(
            "longrope changes its frequencies with the context length, but the shared key of MLA has one set of "
            "frequencies: convert --to lowrank instead"
        )


def reserved_numbers(opened: Source, settings: ConvertSettings, anatomy: AttentionAnatomy) -> int:
    """Return the cached elements per token next to latent and rotated key: gains of a key norm, or a constant channel.

    The most that may be needed: the target class is known only after the split is chosen.
    """
    if anatomy.k_norm is not None:
        return anatomy.key_gains
    if settings.engine is not None:
        return 0  # engines support no bias, and hence no constant channel
    stock = settings.carrier != "own" and not opened.family.experts
    stock = stock and not kept_layers(settings.keep_layers, opened.windows, opened.fixed)
    eps = opened.reader.config.get("rms_norm_eps", 1e-6)
    return int(stock and abs(eps - 1e-6) > 1e-12)


def carrier_of(opened: Source, plan: MLAPlan, settings: ConvertSettings) -> Carrier:
    """Choose the target class of a planned conversion.

    Raises SurgeryError: the class of the settings cannot hold the result.
    """
    anatomy = opened.first
    limits = MLALimits()
    if settings.engine is not None:
        limits = mla_limits(settings.engine, anatomy.head_dim, anatomy.value_dim)
    layers = opened.layers
    if plan.counts is None:
        pairs = anatomy.head_dim // 2
        frequencies = [torch.arange(0, pairs, pairs // (plan.split.rope_dim // 2))] * layers
    else:
        frequencies = [torch.arange(len(counts)).repeat_interleave(counts) for counts in plan.counts]
    rotations = [opened.family.rotation(opened.config, layer).inv_freq for layer in range(layers)]
    inv_freq = tuple(each[pairs] for each, pairs in zip(rotations, frequencies, strict=True))
    spec = mla_spec(opened, plan.all_ranks(layers), inv_freq)
    config, vision = opened.reader.config, "a vision tower" if opened.reader.stored_names else None
    return choose_carrier(
        config,
        spec,
        obstacles(
            config,
            spec,
            experts=opened.family.experts,
            mlp_bias=opened.mlp_bias,
            extra_parts=opened.family.extra_parts or vision,
        ),
        choice=settings.carrier,
        head_sizes=limits.head_sizes,
        tied=limits.tied,
    )


def mla_spec(opened: Source, ranks: tuple[int, ...], inv_freq: tuple[Tensor, ...]) -> MLASpec:
    """Build the shapes of a conversion from the ranks and inverse frequencies of all layers."""
    anatomy = opened.first
    names = opened.family.attention_names(opened.reader, opened.first_layer)
    return MLASpec(
        heads=anatomy.heads,
        head_dim=anatomy.head_dim,
        value_dim=anatomy.value_dim,
        hidden=anatomy.hidden,
        ranks=ranks,
        inv_freq=inv_freq,
        dtype=anatomy.q.dtype,
        query_bias=any(name.endswith("q_proj.bias") for name in names),
        latent_bias=any(name.endswith(("k_proj.bias", "v_proj.bias")) for name in names),
        output_bias=any(name.endswith("o_proj.bias") for name in names),
        key_norm_eps=anatomy.k_norm.eps if anatomy.k_norm else None,
        windows=opened.windows,
        input_lengths=tuple(float(opened.input_scale(layer).double().norm()) for layer in range(opened.layers)),
    )


def all_tensors(opened: Source, writer: StockMLA | OwnMLA, unchanged: frozenset[int]) -> dict[str, TensorSpec]:
    """Return the specs of all tensors of the result, including copied ones."""
    tensors = replanned_tensors(opened, writer.copied, writer.plan, unchanged)
    if isinstance(writer, StockMLA) and writer.untied:
        tensors[HEAD] = tensors[EMBEDDING]
    return tensors
