"""Shared basis of the keys and values of a group of adjacent layers, and the simulation of the shared cache.

Let ``z_i = [k ; v]`` be the keys and values of all KV heads of layer i in the group, without biases and before key
norm and rotation. The cache holds ``c = Σ_i down_i z_i`` of a token, once for the group, and layer i reads
``ẑ_i = up_i c``. xKV (arXiv:2503.18893) computes such a basis from each prompt under the plain norm; here it minimizes
the error over calibration text in the metric of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.calibration.statistics import LayerStatistics
from surgery.families.anatomy import AttentionAnatomy, LayerAnatomy
from surgery.families.attention import expanded_heads, latent_cache, output
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.families.rope import phases, rotate
from surgery.model.group_stores import MergedPairs
from surgery.transforms.algebra import damp, reduced_rank_projection

Rebuild = Callable[[list[Tensor]], list[Tensor]]
"""Function from the keys and values [B, C, n] that the layers of a group wrote to the rebuilt ones."""


@dataclass(frozen=True)
class SharedBasis:
    """Shared basis of a group of W layers: ``down`` [r, n] and ``up`` [n, r] per layer.

    ``energy`` are all W·n in the metric, descending. ``error`` is relative, ``E Σ_i ‖M_i^{1/2} (z_i - ẑ_i)‖²`` divided
    by its value for ``ẑ = 0``.
    """

    down: tuple[Tensor, ...]
    up: tuple[Tensor, ...]
    energy: Tensor
    error: float

    def to(self, *args, **kwargs) -> SharedBasis:
        """Return a copy with the maps moved or cast."""
        down, up = (tuple(part.to(*args, **kwargs) for part in parts) for parts in (self.down, self.up))
        return SharedBasis(down, up, self.energy, self.error)

    def rebuild(self, blocks: list[Tensor]) -> list[Tensor]:
        """Rebuild ẑ_i [..., n] of all layers from their z_i [..., n]."""
        shared = sum(block @ down.mT for block, down in zip(blocks, self.down, strict=True))
        return [shared @ up.mT for up in self.up]


def shared_basis(moment: Tensor, metrics: Sequence[Tensor], rank: int) -> SharedBasis:
    """Compute the basis of a group with the least error.

    Minimizes ``E Σ_i ‖M_i^{1/2} (z_i - ẑ_i)‖²`` over all maps of rank r: reduced-rank regression of the stacked z on
    itself under ``M = diag(M_0, …)``. M has no blocks across layers: their gradients hardly correlate, and such blocks
    measured no better.

    Args:
        moment: ``E[z zᵀ]`` of the stacked z, float64 [W·n, W·n].
        metrics: ``M_i`` [n, n] of each layer, damped.
        rank: r, at most W·n.
    """
    widths = [len(metric) for metric in metrics]
    down, up, energy = reduced_rank_projection(moment, torch.block_diag(*metrics), rank)
    error = float(energy[rank:].sum() / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny))
    return SharedBasis(down.split(widths, dim=1), up.split(widths), energy, error)


def loss_metric(statistics: LayerStatistics, first: int = 0) -> Tensor:
    """Compute the damped Fisher information [n, n] of keys before their norm and values, from row ``first`` on."""
    raw = statistics.raw_gradient
    return damp((statistics.gradient if raw is None else raw)[first:, first:])


def merged_pair(heads: int, pairs: int, interpolation: float) -> Rebuild:
    """Build MiniCache's merge of two layers, as the model class stores it.

    ``pairs`` tokens of a block stay unmerged; ``interpolation`` is the later layer's share in the direction, t of
    SLERP.
    """

    def rebuild(blocks: list[Tensor]) -> list[Tensor]:
        tokens, width = blocks[0].shape[-2:]
        store = MergedPairs(heads, width // 2, tokens, pairs, interpolation)
        for index, block in enumerate(blocks):
            store.write(index, block[:, None])
        return [store.read(index, 0, tokens)[:, 0] for index in range(2)]

    return rebuild


class SimulatedGroup:
    """Simulation of a shared cache: runs the layers of a group on prompts, block by block, with surrogate attention.

    A query at position m reads exact z of the positions in its own block of C tokens, of n > m - ``window`` and of n <
    ``sinks``. It reads z of all others rebuilt by ``rebuild`` from a complete block.
    """

    def __init__(self, members: Sequence[SimulatedMember], rebuild: Rebuild):
        self.members, self._rebuild, self._block = members, rebuild, members[0].block

    @classmethod
    def of(
        cls, sources: Sequence[LayerAnatomy], rebuild: Rebuild, block: int, *, sinks: int = 0, window: int = 0
    ) -> SimulatedGroup:
        """Build the simulation of the layers with these anatomies."""
        latent = isinstance(sources[0], LatentAnatomy)
        member = SimulatedLatents if latent else SimulatedKeysValues
        return cls([member(source, block, sinks, window) for source in sources], rebuild)

    @torch.no_grad()
    def run(self, layers: Callable[[Tensor, Sequence[nn.Module]], Tensor], hidden: Tensor) -> Tensor:
        """Compute the group's output [B, T, D]; ``layers`` applies the loaded layers with surrogate attention."""
        for member in self.members:
            member.exact = member.rebuilt = None
        outputs = []
        for piece in hidden.split(self._block, dim=1):
            outputs.append(layers(piece, self.members))
            if piece.shape[1] == self._block:
                blocks = self._rebuild([member.exact[:, -self._block :] for member in self.members])
                for member, block in zip(self.members, blocks, strict=True):
                    member.rebuilt = block if member.rebuilt is None else torch.cat([member.rebuilt, block], dim=1)
        return torch.cat(outputs, dim=1)

    def errors(self) -> tuple[float, ...]:
        """Compute the relative squared error of the last run's rebuilt tokens, over all layers, for each part of z.

        The parts are keys before norm and rotation, and values; for MLA the latent. 0 if no block was complete.
        """
        widths = self.members[0].parts
        sums = []
        for member in self.members:
            if member.rebuilt is None:
                continue
            exact = member.exact[:, : member.rebuilt.shape[1]]
            pairs = zip(exact.split(member.parts, -1), member.rebuilt.split(member.parts, -1), strict=True)
            for z, rebuilt in pairs:
                sums += [(z - rebuilt).double().square().sum(), z.double().square().sum()]
        error, energy = torch.zeros(2, len(widths), dtype=torch.float64)
        if sums:
            for member_sums in torch.stack(sums).cpu().view(-1, len(widths), 2):
                error += member_sums[:, 0]
                energy += member_sums[:, 1]
        return tuple((error / energy.clamp_min(torch.finfo(torch.float64).tiny)).tolist())


class SimulatedMember(nn.Module):
    """Surrogate module for the attention of one layer of a group; takes a prompt in blocks of C tokens.

    Holds z of all tokens so far, [B, S, n], and ẑ of those in complete blocks, [B, S', n].
    """

    def __init__(self, block: int, sinks: int, window: int):
        super().__init__()
        self.block, self._sinks, self._window = block, sinks, window
        self.exact: Tensor | None = None
        self.rebuilt: Tensor | None = None

    @property
    def parts(self) -> list[int]:
        """Widths of the parts of z."""
        raise NotImplementedError

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append z of a block [B, T, n]; return the tokens to read, rebuilt ones first, [B, S' + S, n].

        Their positions are [S' + S], and the mask of visible tokens is bool [T, S' + S].
        """
        self.exact = tokens if self.exact is None else torch.cat([self.exact, tokens], dim=1)
        count = self.exact.shape[1]
        first = count - tokens.shape[1]
        positions = torch.arange(count, device=tokens.device)
        lag = positions[first:, None] - positions
        in_window = (positions >= first // self.block * self.block) | (lag < self._window) | (positions < self._sinks)
        old = 0 if self.rebuilt is None else self.rebuilt.shape[1]
        visible = torch.cat([((lag >= 0) & ~in_window)[:, :old], (lag >= 0) & in_window], dim=1)
        read = self.exact if not old else torch.cat([self.rebuilt, self.exact], dim=1)
        return read, torch.cat([positions[:old], positions]), visible


class SimulatedKeysValues(SimulatedMember):
    """Surrogate attention whose z are bias-free keys and values."""

    def __init__(self, source: AttentionAnatomy, block: int, sinks: int, window: int):
        super().__init__(block, sinks, window)
        self.source = source

    @property
    def parts(self) -> list[int]:
        """Width of all keys and of all values."""
        return [self.source.k.shape[:2].numel(), self.source.v.shape[:2].numel()]

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        source = self.source
        weight = torch.cat([source.k.flatten(0, 1), source.v.flatten(0, 1)])
        read, positions, visible = self._read(hidden_states @ weight.mT)
        keys, values = self._key_value(read)
        phase = phases(source.inv_freq, positions, keys.dtype)
        queries = rotate(source.project_queries(hidden_states), phase[-hidden_states.shape[1] :])
        heads = (part.transpose(1, 2) for part in (queries, rotate(keys, phase), values))
        return output(source, source.softmax.mix(*heads, visible).transpose(1, 2), hidden_states), None

    def _key_value(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys, normalized and not yet rotated, and values, both [B, S, G, ·], from tokens [B, S, n]."""
        source = self.source
        keys, values = (part.unflatten(-1, (source.kv_heads, -1)) for part in tokens.split(self.parts, dim=-1))
        keys = keys if source.k_bias is None else keys + source.k_bias
        values = values if source.v_bias is None else values + source.v_bias
        return keys if source.k_norm is None else source.k_norm(keys), values


class SimulatedLatents(SimulatedMember):
    """Surrogate MLA whose z are the latents after their norm; rotary keys stay exact."""

    def __init__(self, source: LatentAnatomy, block: int, sinks: int, window: int):
        super().__init__(block, sinks, window)
        self.source = source
        self._rotated: Tensor | None = None

    @property
    def parts(self) -> list[int]:
        """Width of the latent."""
        return [self.source.rank]

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        source, first = self.source, 0 if self.exact is None else self.exact.shape[1]
        queries, latent, rotated = latent_cache(source, source.project(hidden_states), first)
        self._rotated = rotated if not first else torch.cat([self._rotated, rotated], dim=2)
        read, positions, visible = self._read(latent[:, 0])
        heads = expanded_heads(source, read[:, None], self._rotated[:, :, positions])
        return output(source, source.softmax.mix(queries, *heads, visible).transpose(1, 2), hidden_states), None
