"""Attention of streaming heads over whole sequences, without cache and padding.

A query at position q sees the key at position p ≤ q if q - p < `recent` or p < `sinks`, as with the cache of
`surgery.model.sink_window_cache`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import BoolTensor, Tensor, nn

from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import cached_heads, output
from surgery.running.attention_tap import AttentionCall

PIECE = 128
"""Queries per piece, at least: memory is that of a piece and the keys that it sees, at any sequence length."""


def streaming_output(call: AttentionCall, sinks: int, recent: int) -> Tensor:
    """Compute the attention output [B, T, H, v] of a causal call with all heads streaming.

    The call has T = S or selected query positions; its mask, such as a sliding window, applies too. Queries are
    processed in pieces with the keys that they see, so that the work grows with T, not T².
    """
    if call.positions is not None:
        keys = torch.arange(call.key.shape[2], device=call.positions.device)
        streams = (call.positions[:, None] - keys < recent) | (keys < sinks)
        return replace(call, mask=call.mask & streams).output()
    length, parts = call.query.shape[2], []
    piece = max(PIECE, (sinks + recent) // 2)  # longer pieces mask more of their keys, shorter ones are many
    for start in range(0, length, piece):
        stop = min(start + piece, length)
        first = max(0, start - recent + 1)
        first = 0 if first <= sinks else first
        positions = torch.arange(sinks if first else 0), torch.arange(first, stop)
        key_positions = torch.cat(positions).to(call.query.device)
        near = slice(first, stop)
        key, value = call.key[:, :, near], call.value[:, :, near]
        if first:
            key = torch.cat((call.key[:, :, :sinks], key), dim=2)
            value = torch.cat((call.value[:, :, :sinks], value), dim=2)
        queries = torch.arange(start, stop, device=key_positions.device)[:, None]
        mask = (key_positions <= queries) & ((queries - key_positions < recent) | (key_positions < sinks))
        mask = mask[None, None]
        if call.mask is not None:
            mask = mask & call.mask[:, :, start:stop][..., key_positions]
        part = replace(call, query=call.query[:, :, start:stop], key=key, value=value, mask=mask)
        parts.append(part.output())
    return torch.cat(parts, dim=1)


def mixed_output(call: AttentionCall, streams: BoolTensor, sinks: int, recent: int) -> Tensor:
    """Compute the attention output [B, T, H, v] with the KV heads of ``streams`` [G] streaming."""
    if not streams.any():
        return call.output()
    heads = []
    for head in range(call.kv_heads):
        own = call.of_heads(head, head + 1)
        heads.append(streaming_output(own, sinks, recent) if streams[head] else own.output())
    return torch.cat(heads, dim=2)


class StreamingAttention(nn.Module):
    """Surrogate for a transformers attention module with streaming KV heads as in `mixed_output`; prompts only."""

    def __init__(self, anatomy: AttentionAnatomy, streams: BoolTensor, sinks: int, recent: int):
        super().__init__()
        self.anatomy, self.streams, self.sinks, self.recent = anatomy, streams, sinks, recent

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        anatomy, projection = self.anatomy, self.anatomy.project(hidden_states)
        queries, keys, values = cached_heads(anatomy, projection)
        call = AttentionCall(0, queries, keys, values, None, anatomy.scale, anatomy.softcap, anatomy.sinks)
        attn_output = mixed_output(call, self.streams, self.sinks, self.recent)
        return output(anatomy, attn_output, hidden_states), None
