"""Gates on KV heads: interpolation between full and streaming attention, with memory-efficient gradients.

A gate of 1 is a full head, 0 a streaming one. Values between mix the two outputs before the output projection
(DuoAttention, Xiao et al., arXiv:2410.10819). Gates are float32 tensors outside the model, which is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import LongTensor, Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from surgery.common.errors import SurgeryError
from surgery.heads.streaming import streaming_output
from surgery.running.attention_tap import AttentionCall, tap_attention


def gated_output(call: AttentionCall, gates: Tensor, sinks: int, recent: int) -> Tensor:
    """Return the attention output [B, T, H, v], in the call's dtype, under the gates [G] of its KV heads.

    The mixture and the gates' gradient are float32. Both outputs are computed even for gates of 0 or 1, whose gradient
    is their difference; the output with factor 0 is then computed without gradients.
    """
    parts, start, differentiates = [], 0, torch.is_grad_enabled()
    for (opens, closes), run in groupby(gates.tolist(), lambda gate: (gate > 0, gate < 1)):
        heads = slice(start, start + len(list(run)))
        own, start = call.of_heads(heads.start, heads.stop), heads.stop
        with torch.set_grad_enabled(opens and differentiates):
            full = own.output()
        with torch.set_grad_enabled(closes and differentiates):
            streaming = streaming_output(own, sinks, recent)
        share = gates[heads].to(full.device).repeat_interleave(full.shape[2] // own.kv_heads)
        parts.append(torch.lerp(streaming.float(), full.float(), share[:, None]).to(full.dtype))
    return torch.cat(parts, dim=2)


@contextmanager
def gated_heads(
    model: PreTrainedModel, gates: Tensor, sinks: int, recent: int, positions: LongTensor | None = None
) -> Iterator[None]:
    """Apply ``gates`` [L, G] float32 to the KV heads of ``model`` within a ``with`` block.

    A backward pass that recomputes layers must run inside the block. For ``positions`` see `tap_attention`.
    """

    def attention(call: AttentionCall) -> Tensor:
        return gated_output(call, gates[call.layer], sinks, recent)

    with tap_attention(model, attention, positions):
        yield


@contextmanager
def recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint activations per layer within a ``with`` block: the backward pass recomputes each layer from its input.

    transformers checkpoints layers in training mode only. Their submodules stay in evaluation mode, so dropout and
    router noise remain off, and the model computes the same as in evaluation. Raises SurgeryError: the model's layers
    do not support gradient checkpointing.
    """
    layers = list(model.base_model.layers)
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise SurgeryError(
            f"{type(model).__name__}: its layers do not support gradient checkpointing, which gate training needs"
        )

    def recompute(function, *inputs):
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    before = [{name: layer.__dict__.get(name) for name in _SWITCHES} for layer in layers]
    for layer in layers:
        layer.training, layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, True, recompute
    try:
        yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            for name, value in values.items():
                if value is None:
                    del layer.__dict__[name]
                else:
                    setattr(layer, name, value)


_SWITCHES = "training", "gradient_checkpointing", "_gradient_checkpointing_func"
