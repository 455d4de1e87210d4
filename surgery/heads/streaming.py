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


def compensated_output(call: AttentionCall, sinks: int, recent: int) -> Tensor:
    """Compute streaming attention [B, T, H, v] with a compensation token for each query.

    RazorAttention (Tang et al., arXiv:2407.15891, §3.2): the N pairs that a query has evicted become one pair, their
    mean key, as cached, and mean value, with log N added to its logit. Here N is per query, in the prompt too, so that
    chunked prefill gives the same result.
    """
    group, parts = call.query.shape[1] // call.kv_heads, []
    for start in range(0, call.query.shape[2], PIECE):
        query = call.query[:, :, start : start + PIECE].unflatten(1, (call.kv_heads, group)).float()
        stop = start + query.shape[3]
        key, value = call.key[:, :, :stop].float(), call.value[:, :, :stop].float()
        queries = torch.arange(start, stop, device=key.device)[:, None]
        key_positions = torch.arange(stop, device=key.device)
        dropped = (key_positions >= sinks) & (queries - key_positions >= recent)
        count = dropped.sum(-1)
        share = dropped.float() / count.clamp(min=1)[:, None]
        mean_key, mean_value = (share @ key)[:, :, None], (share @ value)[:, :, None]  # [B, G, 1, n, ·]
        softmax = call.softmax  # hybrids do not support learned sinks
        logits = softmax.logits(query @ key[:, :, None].mT).masked_fill(dropped | (key_positions > queries), -torch.inf)
        extra = softmax.logits((query * mean_key).sum(-1)) + count.log()
        weights = torch.cat((logits, extra[..., None]), dim=-1).softmax(-1)
        out = weights[..., :-1] @ value[:, :, None] + weights[..., -1:] * mean_value
        parts.append(out.flatten(1, 2).transpose(1, 2).to(call.value.dtype))
    return torch.cat(parts, dim=1)


def mixed_output(
    call: AttentionCall, streams: BoolTensor, sinks: int, recent: int, compensated: BoolTensor | None = None
) -> Tensor:
    """Compute the attention output [B, T, H, v] with the KV heads of ``streams`` [G] streaming.

    Streaming heads in ``compensated`` [G] have a compensation token.
    """
    if not streams.any():
        return call.output()
    heads = []
    for head in range(call.kv_heads):
        own = call.of_heads(head, head + 1)
        if not streams[head]:
            heads.append(own.output())
        elif compensated is not None and compensated[head]:
            heads.append(compensated_output(own, sinks, recent))
        else:
            heads.append(streaming_output(own, sinks, recent))
    return torch.cat(heads, dim=2)


class StreamingAttention(nn.Module):
    """Surrogate for a transformers attention module with streaming KV heads as in `mixed_output`; prompts only."""

    def __init__(
        self, anatomy: AttentionAnatomy, streams: BoolTensor, sinks: int, recent: int, compensated: BoolTensor
    ):
        super().__init__()
        self.anatomy, self.streams, self.sinks, self.recent = anatomy, streams, sinks, recent
        self.compensated = compensated

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        anatomy, projection = self.anatomy, self.anatomy.project(hidden_states)
        queries, keys, values = cached_heads(anatomy, projection)
        call = AttentionCall(0, queries, keys, values, None, anatomy.scale, anatomy.softcap, anatomy.sinks)
        attn_output = mixed_output(call, self.streams, self.sinks, self.recent, self.compensated)
        return output(anatomy, attn_output, hidden_states), None
