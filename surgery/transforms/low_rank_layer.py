"""Low-rank form of an attention layer, the result of every low-rank conversion, and its simulation.

An attention layer in low-rank form caches latents instead of keys and values, and rebuilds keys and values before RoPE:

    c   = down x - shared_down c_shared           [r], cached; the blocks' latents one after another
    k_g = key_up[g] [c_shared ; c] + key_bias[g]  then the key norm, if there is one, and RoPE
    v_g = value_up[g] [c_shared ; c] + value_bias[g]

``c_shared`` are latents that earlier layers of a group cached of the same token; reading them again needs no further
cache. Quantized latents of a layer omit the part that ``c_shared`` predicts (``shared_down``). Each block of latents
serves a set of key heads and a set of value heads. One block for all heads is a joint latent, one for keys and one for
values is CSKV (arXiv:2409.10593), and two for every few heads is Palu (arXiv:2407.21118).

A residual window and the attention sinks may stay in full precision next to the latents, as in CSKV's bi-branch cache:
a query at position m reads exact keys of positions n < sinks and n > m - window, and rebuilt keys of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.families.anatomy import AttentionAnatomy, Projection, moved
from surgery.families.attention import attend, output
from surgery.families.rope import phases, rotate
from surgery.model.low_rank_entry import Block
from surgery.transforms.row_quantizer import Read


@dataclass(frozen=True)
class LowRankLayer:
    """One attention layer in low-rank form, with r own latents and s shared latents."""

    source: AttentionAnatomy  # the unconverted layer; its queries, output, norms and RoPE stay in use
    blocks: tuple[Block, ...]
    down: Tensor  # [r, D]
    key_up: Tensor  # [G, d, s + r], zero outside the blocks; rebuilds keys before their norm
    value_up: Tensor  # [G, e, s + r]
    shared_down: Tensor | None = None  # [r, s]; None if own latents omit nothing

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def shared(self) -> int:
        """Number of latents of earlier layers that the layer reads."""
        return self.key_up.shape[-1] - self.rank

    def to(self, *args, **kwargs) -> LowRankLayer:
        """Return a copy with every tensor but the frequencies moved or cast."""
        return moved(self, *args, **kwargs)

    def latents(self, x: Tensor, shared: Tensor | None = None) -> Tensor:
        """Compute the cached latents [..., r] from inputs ``x`` [..., D] and the shared latents [..., s]."""
        own = x @ self.down.mT
        return own if self.shared_down is None else own - shared @ self.shared_down.mT

    def rebuilt(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Rebuild keys, normalized and not yet rotated, and values, both [B, T, G, ·], from latents [B, T, s + r]."""
        keys = torch.einsum("btr,gdr->btgd", latents, self.key_up)
        values = torch.einsum("btr,ger->btge", latents, self.value_up)
        source = self.source
        keys = keys if source.k_bias is None else keys + source.k_bias
        values = values if source.v_bias is None else values + source.v_bias
        return keys if source.k_norm is None else source.k_norm(keys), values

    def attend(self, x: Tensor, latents: Tensor) -> Tensor:
        """Compute head outputs [B, T, H, e] of a causal prompt ``x`` from latents [B, T, s + r]."""
        return attend(self.source, Projection(self.source.project_queries(x), *self.rebuilt(latents), None))


class SimulatedLowRank(nn.Module):
    """Surrogate for a transformers attention module that computes a low-rank layer; prompts only, no cache.

    Args:
        earlier: surrogate modules of the group's earlier layers. Call number i of this module reads their latents of
            call i, so all have to see the same prompts in the same order.
        sinks, window: tokens whose keys and values are exact, see the top of this file.
        read: maps latents to the values that a cache of packed rows returns.
        remembers: whether to record latents [B, T, r], one tensor per call, for later layers of a group.
    """

    def __init__(
        self,
        layer: LowRankLayer,
        earlier: tuple[SimulatedLowRank, ...] = (),
        *,
        sinks: int = 0,
        window: int = 0,
        read: Read | None = None,
        remembers: bool = False,
    ):
        super().__init__()
        self.layer, self.sinks, self.window, self.read = layer, sinks, window, read
        self.remembers = remembers
        self._earlier = earlier  # a tuple, so that they do not become submodules
        self.latents: list[Tensor] = []

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        layer, source, call = self.layer, self.layer.source, len(self.latents)
        shared = [other.latents[call] for other in self._earlier]
        own = layer.latents(hidden_states, torch.cat(shared, dim=-1) if shared else None)
        own = own if self.read is None else self.read(own)
        if self.remembers:
            self.latents.append(own)
        latents = torch.cat([*shared, own], dim=-1)
        keys, values = layer.rebuilt(latents)
        phase = phases(source.inv_freq, torch.arange(keys.shape[1], device=keys.device), keys.dtype)
        queries = rotate(source.project_queries(hidden_states), phase)
        keys, visible = rotate(keys, phase), self._visible(keys.shape[1], keys.device)
        if self.sinks or self.window:
            exact = source.project(hidden_states)
            exact_keys = exact.k if exact.key_gain is None else exact.k * exact.key_gain[..., None]
            keys = torch.cat([keys, rotate(exact_keys, phase)], dim=1)
            values = torch.cat([values, exact.v], dim=1)
        heads = (part.transpose(1, 2) for part in (queries, keys, values))
        attn_output = source.softmax.mix(*heads, visible)
        return output(source, attn_output.transpose(1, 2), hidden_states), None

    def _visible(self, tokens: int, device: torch.device) -> Tensor:
        """Build the attention mask, bool [T, T], or [T, 2T] with exact keys after the rebuilt ones."""
        positions = torch.arange(tokens, device=device)
        lag = positions[:, None] - positions
        mask = lag >= 0
        if self.layer.source.window is not None:
            mask &= lag < self.layer.source.window
        if not (self.sinks or self.window):
            return mask
        exact = (lag < self.window) | (positions < self.sinks)
        return torch.cat([mask & ~exact, mask & exact], dim=1)
