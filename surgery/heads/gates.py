"""Gates on KV heads: attention that lies between full and streaming, and gradients through it in little memory.

A gate of 1 is a full head, 0 a streaming one, and what lies between mixes the two outputs before the output projection
(DuoAttention, Xiao et al., arXiv:2410.10819). Gates are float32 and stand outside the model, which is
frozen and as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import LongTensor, Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from surgery.common.errors import SurgeryError
from surgery.eval.logits import ROWS_AT_ONCE, LogitReader
from surgery.heads.streaming import streaming_output
from surgery.running.attention_tap import AttentionCall, tapped


def gated_output(call: AttentionCall, gates: Tensor, sinks: int, recent: int) -> Tensor:
    """Return the attention output [B, T, H, v], in the call's dtype, under the gates [G] of its KV heads.

    The mixture and the gates' gradient are float32. Both outputs are computed also where a gate is 0 or 1: its
    gradient is their difference. But there one of them has a factor of 0, and no gradient goes back through it.
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
    model: PreTrainedModel, gates: Tensor, sinks: int, recent: int, places: LongTensor | None = None
) -> Iterator[None]:
    """Puts the KV heads of ``model`` under ``gates`` [L, G] float32 for the length of a ``with`` block.

    A backward pass that computes layers again belongs inside of the block.

    Args:
        places: as in `tapped`.
    """

    def attention(call: AttentionCall) -> Tensor:
        return gated_output(call, gates[call.layer], sinks, recent)

    with tapped(model, attention, places):
        yield


@contextmanager
def recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint activations: each layer keeps nothing but its input for the backward pass, which computes it again.

    transformers does that for layers in training mode only. Their insides stay in evaluation mode: dropout and the
    noise of routers remain off, and the model computes what it does when it is evaluated.

    Raises:
        SurgeryError: the model's layers cannot do it.
    """
    layers = list(model.base_model.layers)
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise SurgeryError(f"{type(model).__name__}: its layers cannot be computed again for gradients of gates")

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


def mean_loss(reader: LogitReader, tokens: LongTensor) -> Tensor:
    """Mean cross-entropy of all tokens but each row's first, in nats: a float32 scalar with gradients if enabled.

    Fp32 logits exist for a few positions at a time, in the backward pass too, which computes them again.

    Args:
        tokens: [B, T] int64.
    """
    states = reader.states(tokens)[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten().to(states.device)

    def summed(rows: Tensor, labels: Tensor) -> Tensor:
        logits = reader.logits(rows[None])[0]
        return cross_entropy(logits, labels.to(logits.device), reduction="sum")

    pieces = zip(states.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True)
    losses = [checkpoint(summed, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(losses).sum() / len(targets)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of token ids: the embeddings', or the CPU where their weights are loaded for each pass."""
    device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
