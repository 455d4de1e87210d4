"""The attention of `HybridAttention` by the operators, as a model would call them."""

import torch

from surgery.kernels.hybrid_decode.operator import hybrid_decode
from surgery.kernels.split_kv import merge
from surgery.model.cache_argument import takes_cache
from surgery.model.hybrid_cache import HybridLayer, StreamingLayer
from surgery.model.left_padding import layer_of
from surgery.model.plain_cache import PlainLayer
from surgery.model.rotary import project_heads


@takes_cache
def through_operators(
    self,
    hidden_states,
    position_embeddings,
    attention_mask=None,
    cache=None,
    left_padding=None,
    **kwargs,
):
    """`HybridAttention.forward` by `hybrid_decode`, for layers of which some head streams."""
    query, key, value = project_heads(self, hidden_states, position_embeddings)
    new = HybridLayer(PlainLayer(), StreamingLayer(self.sinks, self.recent, self.compensated_heads))
    layer = layer_of(cache, self.layer_idx, new, len(query), left_padding)
    streaming, full = layer.streaming, self.full_heads
    starts = layer.padding.on(query.device, torch.int32)
    sink_slots = streaming.sink_keys.shape[2] if streaming.is_initialized else 0
    streaming_key, streaming_value = streaming.update(key[:, full:], value[:, full:])
    if full:
        full_key, full_value = layer.full.update(key[:, :full], value[:, :full])
    else:
        full_key = full_value = key.new_empty(len(key), 0, streaming.seen, key.shape[-1])
    out, lse = hybrid_decode(
        query.transpose(1, 2),
        full_key,
        full_value,
        streaming_key,
        streaming_value,
        self.scaling,
        sink_slots=sink_slots,
        sinks=self.sinks,
        recent=self.recent,
        starts=starts,
    )
    if self.compensated_heads:
        out = compensated(self, query.transpose(1, 2), out, lse, streaming.take_dropped())
    return self.o_proj(out.flatten(2)), None


def compensated(self, query, out, lse, dropped):
    """out [B, T, H, d] whose last heads see the means of what was dropped too: one token, merged as a part."""
    heads = self.compensated_heads * self.num_key_value_groups
    means, values = (
        mean.repeat_interleave(self.num_key_value_groups, dim=1).transpose(1, 2)
        for mean in (dropped.keys, dropped.values)
    )
    log = self.scaling * (query[:, :, -heads:] * means).sum(-1) + dropped.count.to(lse.dtype).log()[..., None]
    parts, logs = torch.stack([out[:, :, -heads:], values], dim=-2), torch.stack([lse[:, :, -heads:], log], dim=-1)
    merged, _ = merge(parts, logs)
    return torch.cat([out[:, :, :-heads], merged.to(out.dtype)], dim=2)
