"""Acceleration of a loaded model: run its attention on Triton kernels, and restore it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from surgery.acceleration import stock_mla
from surgery.acceleration.comparison import TOLERANCE, step_error
from surgery.acceleration.latent import latent_kernel, why_not_latent
from surgery.acceleration.low_rank import low_rank_kernel, why_not_low_rank, why_not_rebuilt
from surgery.acceleration.quantized_latent import quantized_latent_kernel, why_not_quantized_latent
from surgery.acceleration.quantized_low_rank import quantized_low_rank_kernel
from surgery.kernels import cpu
from surgery.kernels.backend import DTYPES, interpreted, refusal
from surgery.kernels.lowrank_decode.rows import IN_CPP
from surgery.model.attention_functions import own_softmax
from surgery.model.hybrid_attention import HybridAttention
from surgery.model.latent_attention import LatentAttention
from surgery.model.low_rank_attention import LowRankAttention
from surgery.model.quantized_latent_attention import QuantizedLatentAttention
from surgery.model.quantized_low_rank_attention import QuantizedLowRankAttention

logger = logging.getLogger("surgery.kernels")

STATE = "_surgery_acceleration"
"""Attribute of an accelerated model: the name of its attention implementation before, and its `Acceleration`."""


@dataclass(frozen=True)
class Acceleration:
    """Result of `accelerate`.

    Attributes:
        layers: for each layer the operation that reads its cache, or the reason why it keeps its own code.
        error: relative difference of logits with and without kernels (`comparison.step_error`); None if nothing was
            changed or compared.
        refused: reason why the model is unchanged; None if it is accelerated.
    """

    layers: tuple[str, ...]
    error: float | None = None
    refused: str | None = None


def accelerate(model: PreTrainedModel, *, compare: bool = True) -> Acceleration:
    """Run a model's decode steps on this package's kernels; prompts and plain heads stay on PyTorch's attention.

    Supports stock `deepseek_v3` (reading its latents as cached) and the custom model class. On a CPU only MLA, low
    rank and cascades in bits have kernels; the first call on a machine compiles them, which needs a C++ compiler and
    takes about 20 seconds. Saved checkpoints are unaffected. An accelerated model is left unchanged.

    Args:
        compare: run a short text with and without kernels, and restore the model if the logits differ by more than
            rounding.

    Returns:
        Operation of each layer and measured error. If the model stays unchanged (no kernel for its device, float64,
        logit caps, learned sinks, plain heads alone), `refused` has the reason, which is also logged.
    """
    if hasattr(model, STATE):
        return getattr(model, STATE)[1]
    parameter, attentions = next(model.parameters()), _attentions(model)
    reason = _refusal(parameter, attentions)
    if reason is None and not _supports_attention_functions(model):
        reason = f"{type(model).__name__} does not support custom attention functions"
    if reason is None and own_softmax(model.config):
        reason = "no kernel supports logit softcaps or learned sinks"
    if reason is None and not any(isinstance(module, CHANGED) for module in attentions):
        reason = "all layers have plain heads, which PyTorch's attention reads"
    if reason is not None:
        logger.warning("the model is not accelerated: %s", reason)
        return Acceleration((), refused=reason)
    plain = step_error(model, None) if compare else None
    before = model.config._attn_implementation
    stock_mla.register()
    model.set_attn_implementation(stock_mla.NAME)
    layers = tuple(_accelerate_module(module, attentions) for module in attentions)
    setattr(model, STATE, (before, Acceleration(layers)))
    if plain is None:
        return getattr(model, STATE)[1]
    error = step_error(model, plain)
    if not error <= TOLERANCE[parameter.dtype]:
        decelerate(model)
        reason = f"logits differ by {error:.1e} with kernels, which exceeds {TOLERANCE[parameter.dtype]:.0e}"
        logger.warning("the model is not accelerated: %s", reason)
        return Acceleration(layers, error, refused=reason)
    setattr(model, STATE, (before, Acceleration(layers, error)))
    return getattr(model, STATE)[1]


def decelerate(model: PreTrainedModel) -> None:
    """Undo `accelerate`; no-op for a model that is not accelerated."""
    if not hasattr(model, STATE):
        return
    before = getattr(model, STATE)[0]
    delattr(model, STATE)
    model.set_attn_implementation(before)
    for module in _attentions(model):
        for name in ("kernel", "expand_kv", stock_mla.PASSES_LATENTS):
            module.__dict__.pop(name, None)


KERNELS: tuple[tuple[type[nn.Module], Callable, str, Callable[..., str | None]], ...] = (
    (QuantizedLatentAttention, quantized_latent_kernel, "mla_decode_packed", why_not_quantized_latent),
    (LatentAttention, latent_kernel, "mla_decode", why_not_latent),
    (QuantizedLowRankAttention, quantized_low_rank_kernel, IN_CPP, why_not_rebuilt),
    (LowRankAttention, low_rank_kernel, "lowrank_decode", why_not_low_rank),
)
"""Attention classes, functions that run their kernel, its operation, and functions that return why a layer cannot use
it, or None. The first matching class wins."""

CHANGED = (DeepseekV3Attention, HybridAttention, *(kind for kind, *_ in KERNELS))
"""Attention classes whose cache is not plain heads."""


def _refusal(parameter: torch.Tensor, attentions: list[nn.Module]) -> str | None:
    """Return the reason why no kernel runs on the device and in the dtype of a parameter, or None."""
    if not _in_cpp(parameter):
        return refusal(parameter)
    if not any(operation in cpu.OPERATIONS for module in attentions for _, _, operation, _ in _kernels(module)):
        return "tensors are on the cpu device, where only layers in bits have kernels"
    return cpu.load()


def _in_cpp(parameter: torch.Tensor) -> bool:
    """Return whether the kernels for a parameter's device and dtype are those in C++."""
    return parameter.device.type == "cpu" and not interpreted() and parameter.dtype in DTYPES


def _kernels(module: nn.Module) -> list[tuple]:
    """Return the row of `KERNELS` for a module, in a list; empty if there is none."""
    return [] if isinstance(module, HybridAttention) else [row for row in KERNELS if isinstance(module, row[0])][:1]


def _accelerate_module(module: nn.Module, attentions: list[nn.Module]) -> str:
    """Accelerate one attention module; return its operation, or the reason why it keeps its own code."""
    in_cpp = _in_cpp(module.o_proj.weight)
    if isinstance(module, HybridAttention):
        return f"not accelerated: no kernel for {type(module).__bases__[0].__name__}"
    if isinstance(module, DeepseekV3Attention) and not in_cpp:
        if type(module.kv_b_proj) is not nn.Linear or module.kv_b_proj.bias is not None:
            return "not accelerated: kv_b_proj is not a plain linear layer without bias"
        setattr(module, stock_mla.PASSES_LATENTS, True)
        module.expand_kv = _unexpanded
        return "mla_decode"
    for kind, kernel, operation, why_not in _kernels(module):
        if in_cpp and operation not in cpu.OPERATIONS:
            return f"not accelerated: {operation} has no kernel for this device"
        if operation == IN_CPP and not in_cpp:
            operation = "lowrank_decode"
        if getattr(module, "streaming", None):
            return "not accelerated: latents of streaming heads"
        members = [module]
        if kind is QuantizedLowRankAttention:
            # A layer of a cascade reads what those before it leave for it, so all of them run the kernel or none.
            members, number = [each for each in attentions if isinstance(each, kind)], attentions.index(module)
            kernel = partial(kernel, group=attentions[number - module.shared_layers : number + 1])
        if reason := next(filter(None, map(why_not, members)), None):
            return f"not accelerated: {reason}"
        module.kernel = kernel
        return operation
    return "not accelerated: plain heads, which PyTorch's attention reads"


def _unexpanded(latent: torch.Tensor, rope_key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rope_key


def _attentions(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention modules of the decoder layers, in order."""
    layers = getattr(getattr(model, "model", model), "layers", ())
    return [attention for layer in layers if (attention := getattr(layer, "self_attn", None)) is not None]


def _supports_attention_functions(model: PreTrainedModel) -> bool:
    return bool(_attentions(model)) and bool(getattr(model, "_supports_attention_backend", False))
