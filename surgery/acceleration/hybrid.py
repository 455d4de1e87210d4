"""Hybrid layers on Triton kernels: full and streaming heads in one launch, for decode and the first prefill chunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.acceleration.steps import is_step
from surgery.kernels.hybrid_decode.operator import hybrid_decode
from surgery.kernels.sink_recent_prefill.operator import sink_recent_prefill
from surgery.model.hybrid_cache import HybridLayer
from surgery.model.plain_cache import PlainLayer


def hybrid_kernel(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layer: HybridLayer) -> Tensor | None:
    """Compute outputs [B, T, H, d] of rotated query [B, H, T, d] and new keys and values [B, G, T, d].

    Returns None, with nothing cached, if unsupported: compensated or quantized heads, later chunks of a long prompt.
    """
    full, queries = module.full_heads, query.shape[2]
    if not is_step(module, query, 1) or module.compensated_heads:
        return None
    if (full and type(layer.full) is not PlainLayer) or (layer.streaming and layer.streaming.codes is not None):
        return None
    padding = layer.padding
    starts = padding.on(query.device, torch.int32) if padding is not None and padding.most else None
    if is_step(module, query, queries):
        return _step(module, query, key, value, layer, starts)
    if layer.get_seq_length():
        return None
    everywhere = torch.full((key.shape[1],), -1, dtype=torch.int32, device=query.device)
    sinks, recent = torch.zeros_like(everywhere), everywhere
    sinks[full:], recent[full:] = module.sinks, module.recent
    out, _ = sink_recent_prefill(query, key, value, module.scaling, sinks, recent, starts=starts)
    if full:
        layer.full.update(key[:, :full], value[:, :full])
    if full < module.num_kv_heads:
        for _ in layer.streaming.pieces(key[:, full:], value[:, full:]):
            pass  # each iteration caches its tokens
    return out


def _step(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layer: HybridLayer, starts: Tensor | None
) -> Tensor:
    full = module.full_heads
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
