"""Decode steps of hybrid layers on Triton kernels: full and streaming heads in one launch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.acceleration.steps import is_step
from surgery.kernels.hybrid_decode.operator import hybrid_decode
from surgery.model.hybrid_cache import HybridLayer
from surgery.model.plain_cache import PlainLayer


def hybrid_kernel(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layer: HybridLayer) -> Tensor | None:
    """Compute outputs [B, T, H, d] of rotated query [B, H, T, d] and new keys and values [B, G, T, d].

    Returns None, with nothing cached, if unsupported: prompts, and compensated or quantized heads.
    """
    full = module.full_heads
    if not is_step(module, query, query.shape[2]) or module.compensated_heads:
        return None
    if (full and type(layer.full) is not PlainLayer) or (layer.streaming and layer.streaming.codes is not None):
        return None
    padding = layer.padding
    starts = padding.on(query.device, torch.int32) if padding is not None and padding.most else None
    kv_length = layer.get_seq_length() + query.shape[2]
    full_key, full_value = (each.new_empty(len(each), 0, kv_length, each.shape[-1]) for each in (key, value))
    streaming_key, streaming_value = (each[:, :0] for each in (key, value))
    sink_slots = 0
    if full:
        full_key, full_value = layer.full.update(key[:, :full], value[:, :full])
    if full < module.num_kv_heads:
        streaming = layer.streaming
        sink_slots = streaming.sink_slots
        streaming_key, streaming_value = streaming.update(key[:, full:], value[:, full:])
    out, _ = hybrid_decode(
        query.transpose(1, 2),
        full_key,
        full_value,
        streaming_key,
        streaming_value,
        module.scaling,
        sink_slots=sink_slots,
        sinks=module.sinks,
        recent=module.recent,
        starts=starts,
    )
    return out
