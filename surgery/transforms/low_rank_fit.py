"""Fits a low-rank layer to wanted outputs by Gauss-Newton steps, and sorts its latents by what they are worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy, HeadNorm
from surgery.families.rope import phases
from surgery.running.processes import ALONE, Processes
from surgery.transforms.algebra import eigh_descending, psd_powers
from surgery.transforms.attention_fit import (
    LinearisedAttention,
    LinearisedMixing,
    Wanted,
    fit_attention,
    flat,
    gates,
    gram,
    heads_moment,
    inverse_root,
    unflat,
)
from surgery.transforms.effort import USUAL, Effort
from surgery.transforms.fit_blocks import Blocks
from surgery.transforms.low_rank_layer import LowRankLayer

EMPTY = 1e-9  # a latent with less than this share of the largest energy is kept at that scale, so that bases invert


@torch.no_grad()
def fit_low_rank_layer(
    layer: LowRankLayer,
    inputs: Tensor,
    targets: Tensor,
    metric: Tensor,
    effort: Effort = USUAL,
    *,
    shared: Tensor | None = None,
    damping: float = 0.1,
    processes: Processes = ALONE,
) -> tuple[LowRankLayer, float, float]:
    """Fits q, down, both ups and o together to wanted outputs; biases and norms stay the source's.

    Minimises ``Σ_m ‖F^{1/2} (out_m - target_m)‖²`` as :func:`surgery.transforms.attention_fit.fit_attention` does. No
    number outside the blocks' masks changes. The fitted latents come in a basis of unit covariance within each block,
    in no order: see :func:`order_latents`.

    Args:
        layer: where to start, on the device and in the dtype to compute in (float32 or better).
        inputs: [N, T, D] what enters the attention.
        targets: [N, T, D] wanted outputs, the output bias left out.
        metric: F [D, D], second moment of the loss gradient at the output.
        shared: [N, T, s] latents of the group's earlier layers on the same tokens, constants here; None if s = 0.
        damping: relative to the curvature along the gradient; less fits the sample better and other text worse.
        processes: that share the sequences, see :func:`surgery.transforms.attention_fit.fit_attention`.

    Returns:
        The fitted layer, and the error before and after the last step on its sample, relative to the targets' energy.

    Raises:
        SurgeryError: ``shared`` is not what the layer reads.
    """
    if shared is None:
        shared = inputs.new_empty(*inputs.shape[:2], 0)
    if shared.shape != (*inputs.shape[:2], layer.shared):
        raise SurgeryError(
            f"low-rank fit: the layer reads {layer.shared} shared latents of {tuple(inputs.shape[:2])} tokens,"
            f" got {tuple(shared.shape)}: pass those of the group's earlier layers"
        )
    like, tokens = layer.down, inputs.shape[1]
    (root,) = psd_powers(metric.double(), (0.5,), floor=1e-3)
    root, phase = root.to(like), phases(layer.source.inv_freq, torch.arange(tokens, device=like.device), like.dtype)
    met = (torch.cat([c.to(like), x.to(like)], dim=-1) for c, x in zip(shared, inputs, strict=True))
    moment = sum(map(gram, met)) / inputs.shape[:2].numel()
    own = layer.down.double()
    own = own @ moment[layer.shared :, layer.shared :] @ own.mT
    layer = _rebased(layer, (psd_powers(part, (-0.5, 0.5)) for part in _of_blocks(layer, own)))
    start = _Weights.of(layer)

    def linearise(weights: _Weights, sequence: int, positions: Tensor) -> _Linearisation:
        seen = int(positions[-1]) + 1
        x, c = inputs[sequence, :seen].to(like), shared[sequence, :seen].to(like)
        return _Linearisation(layer, weights, x, c, phase[:seen], positions, root)

    fitted, before, after = fit_attention(
        start,
        linearise,
        lambda blocks: _Preconditioner(layer, start, blocks, moment, root, effort.seed).apply,
        Wanted(targets, root),
        effort,
        damping,
        processes,
    )
    return fitted.put_into(layer), before, after


def order_latents(layer: LowRankLayer, latent_moment: Tensor, z_metric: Tensor) -> tuple[LowRankLayer, Tensor]:
    """The same layer in a basis whose latents are sorted by worth, so that a prefix of each block is its best model.

    With S the second moment of a block's latents c and U what rebuilds z = [k; v] from them, the prefix of r' that
    minimises ``E ‖M^{1/2} U (c - ĉ)‖²`` are the leading eigenvectors of ``S^{1/2} Uᵀ M U S^{1/2} = W Λ Wᵀ`` (Eckart and
    Young 1936), for every r' at once. In the new basis a latent's variance is its share Λ of the error, and
    ``M^{1/2} U`` is orthonormal, as in :func:`surgery.transforms.algebra.reduced_rank_projection`.
    Blocks stay apart and do not know of each other; columns of shared latents stay as they are.

    Args:
        layer: any, fitted or not.
        latent_moment: E[c cᵀ] [r, r] of its own latents; only what is within a block counts.
        z_metric: M [n, n] with n = G (d + e), positive semidefinite: keys head after head as ``key_up`` rebuilds them,
            then values.

    Returns:
        The layer, which computes what it did, and what each latent's loss costs [r], float64, descending within each
        block: ``E ‖M^{1/2} U (c - ĉ)‖²`` without the last latents of a block is the sum of theirs.

    Raises:
        SurgeryError: a matrix of the wrong size.
    """
    ups = torch.cat([up[..., layer.shared :].flatten(0, 1) for up in (layer.key_up, layer.value_up)]).double()
    for name, matrix, size in (("moment", latent_moment, layer.rank), ("metric", z_metric, len(ups))):
        if matrix.shape != (size, size):
            raise SurgeryError(
                f"ordering latents: the {name} is {tuple(matrix.shape)}, this layer's is {size} x {size}"
            )
    worth = ups.mT @ z_metric.to(ups) @ ups
    bases, energies = [], []
    moments = _of_blocks(layer, latent_moment.to(ups))
    for moment, metric in zip(moments, _of_blocks(layer, worth), strict=True):
        root, inverse = psd_powers(moment, (0.5, -0.5))
        energy, basis = eigh_descending(root @ metric @ root)
        energy = energy.clamp_min(0)
        scale = (energy + EMPTY * energy.amax()).clamp_min(torch.finfo(energy.dtype).tiny).sqrt()
        bases.append((scale[:, None] * basis.mT @ inverse, root @ basis / scale))
        energies.append(energy)
    return _rebased(layer, bases), torch.cat(energies)


def _of_blocks(layer: LowRankLayer, matrix: Tensor) -> list[Tensor]:
    """What is on the diagonal of a matrix over the layer's own latents, block by block."""
    ranks = [block.rank for block in layer.blocks]
    return [part.split(ranks, dim=1)[i] for i, part in enumerate(matrix.split(ranks))]


def _rebased(layer: LowRankLayer, bases: Iterable[tuple[Tensor, Tensor]]) -> LowRankLayer:
    """The same layer with each block's latents multiplied by the first matrix, the second being its inverse."""
    change, inverse = (torch.block_diag(*parts) for parts in zip(*bases, strict=True))

    def of(up: Tensor) -> Tensor:
        own = up[..., layer.shared :].double() @ inverse
        return torch.cat([up[..., : layer.shared], own.to(up)], dim=-1)

    down = (change @ layer.down.double()).to(layer.down)
    return replace(layer, down=down, key_up=of(layer.key_up), value_up=of(layer.value_up))


class _Weights(NamedTuple):
    """The fitted matrices, or a change of them, or a gradient."""

    q: Tensor  # [H, d, D]
    down: Tensor  # [r, D]
    key_up: Tensor  # [G, d, s + r]
    value_up: Tensor  # [G, e, s + r]
    o: Tensor  # [D, H, e]

    @classmethod
    def of(cls, layer: LowRankLayer) -> _Weights:
        return cls(layer.source.q, layer.down, layer.key_up, layer.value_up, layer.source.o)

    def put_into(self, layer: LowRankLayer) -> LowRankLayer:
        source = replace(layer.source, q=self.q, o=self.o)
        return replace(layer, source=source, down=self.down, key_up=self.key_up, value_up=self.value_up)


class _Signals(NamedTuple):
    """Gradients at what the matrices put out, and the output matrix's own."""

    q: Tensor  # [H, M, d], before the norm, like the keys'
    latents: Tensor  # [T, r]
    k: Tensor  # [G, T, d]
    v: Tensor  # [G, T, e]
    o: Tensor  # [D, H, e]


class _Linearisation:
    """Some query positions of one sequence around the current weights; x [T, D], shared latents [T, s]."""

    def __init__(
        self,
        layer: LowRankLayer,
        weights: _Weights,
        x: Tensor,
        shared: Tensor,
        phase: Tensor,
        positions: Tensor,
        root: Tensor,
    ):
        source: AttentionAnatomy = layer.source
        self.weights, self.x, self.asking = weights, x, x[positions]
        self.shared = layer.shared
        self.latents = torch.cat([shared, x @ weights.down.mT], dim=-1)  # [T, s + r]
        q = _biased(self.asking @ weights.q.mT, source.q_bias)
        k = _biased(self.latents @ weights.key_up.mT, source.k_bias)
        v = _biased(self.latents @ weights.value_up.mT, source.v_bias)
        self.q_norm, self.k_norm = _LinearisedNorm(q, source.q_norm), _LinearisedNorm(k, source.k_norm)
        mixing = LinearisedMixing(source, self.q_norm.output, self.k_norm.output, v, phase, positions)
        self.attention = LinearisedAttention(mixing, weights.o, root, gates(source, self.asking))
        self.out = self.attention.out

    def jvp(self, vector: Tensor) -> Tensor:
        """Change of the output times F^{1/2} with a flat change of the weights, [M, D]."""
        change = unflat(vector, self.weights)
        latents = self.x @ change.down.mT
        k, v = (
            self.latents @ up_change.mT + latents @ up[..., self.shared :].mT
            for up, up_change in ((self.weights.key_up, change.key_up), (self.weights.value_up, change.value_up))
        )
        q = self.q_norm.jvp(self.asking @ change.q.mT)
        return self.attention.jvp(q, self.k_norm.jvp(k), v, change.o)

    def vjp(self, out: Tensor) -> Tensor:
        """The transpose of :meth:`jvp`."""
        signals = self.signals(out)
        read = (self.asking, self.x, self.latents, self.latents)
        gradients = (signal.mT @ inputs for signal, inputs in zip(signals, read, strict=False))
        return flat((*gradients, signals.o))

    def signals(self, out: Tensor) -> _Signals:
        q, k, v, o = self.attention.vjp(out)
        q, k = self.q_norm.vjp(q), self.k_norm.vjp(k)
        key_up, value_up = self.weights.key_up[..., self.shared :], self.weights.value_up[..., self.shared :]
        return _Signals(q, (k @ key_up + v @ value_up).sum(0), k, v, o)


class _LinearisedNorm:
    """The RMS norm of head vectors around some [heads, T, d]; nothing where a layer has none."""

    def __init__(self, raw: Tensor, norm: HeadNorm | None):
        self.norm, self.output = norm, raw
        if norm is not None:
            self.over = (0, -1) if norm.joint else -1
            self.weight = norm.weight[:, None] if norm.joint else norm.weight
            self.gain = (raw.square().mean(self.over, keepdim=True) + norm.eps).rsqrt()
            self.unit = raw * self.gain
            self.output = self.unit * self.weight

    def jvp(self, change: Tensor) -> Tensor:
        return change if self.norm is None else self._radial(change) * self.weight

    def vjp(self, signal: Tensor) -> Tensor:
        return signal if self.norm is None else self._radial(signal * self.weight)

    def _radial(self, change: Tensor) -> Tensor:
        """The Jacobian without the weight, which is symmetric: the length cannot change."""
        return self.gain * (change - self.unit * (self.unit * change).mean(self.over, keepdim=True))


class _Preconditioner:
    """Symmetric factors on both sides of each matrix, after which the curvatures of all unknowns are alike.

    Those of K-FAC (Martens and Grosse 2015, arXiv:1503.05671): on the right the second moment of what a matrix reads,
    on the left that of the gradients at what it puts out, for output gradients drawn from the unit Gaussian: its
    expectation is that matrix's part of JᵀJ. Ups read only the latents within their mask: the factor is zero outside,
    so that no step leaves the blocks.
    """

    def __init__(
        self,
        layer: LowRankLayer,
        weights: _Weights,
        blocks: Blocks[_Linearisation],
        moment: Tensor,
        root: Tensor,
        seed: int,
    ):
        own = torch.block_diag(torch.eye(layer.shared).to(moment), weights.down.double())
        latents, generators = own @ moment @ own.mT, blocks.generators(len(root), seed)

        def met_in(part: int) -> list[Tensor]:
            met: list[Tensor] = [0, 0, 0, 0]
            for block in blocks.items(part):
                out = torch.randn(len(block.asking), len(root), generator=generators[part]).to(root)
                *signals, _ = block.signals(out)
                met = [total + gram(signal) for total, signal in zip(met, signals, strict=True)]
            return met

        met = blocks.total_of_parts(met_in)
        self.lefts = [inverse_root(part, root) for part in (*met, (root @ root).double())]
        x = inverse_root(moment[layer.shared :, layer.shared :], root)
        ups = (_masked_inverse_root(latents, mask, root) for mask in (layer.key_mask(), layer.value_mask()))
        self.rights = [x, x, *ups, inverse_root(heads_moment(blocks), root)]
        self.weights = weights

    def apply(self, vector: Tensor) -> Tensor:
        """Whitened unknowns to weights; its own transpose, so gradients go the other way by it too."""
        q, down, key_up, value_up, o = unflat(vector, self.weights)
        matrices = (q, down, key_up, value_up, o.flatten(1))
        return flat(
            left @ matrix @ right for left, matrix, right in zip(self.lefts, matrices, self.rights, strict=True)
        )


def _masked_inverse_root(moment: Tensor, masks: Tensor, like: Tensor) -> Tensor:
    """For each head's mask [G, n] the inverse root of the moment [n, n] within it, zero outside: [G, n, n]."""
    kinds, kind_of = masks.unique(dim=0, return_inverse=True)
    roots = torch.zeros(len(kinds), *moment.shape).to(like)
    for root, mask in zip(roots, kinds, strict=True):
        if len(seen := mask.nonzero()[:, 0]):
            root[seen[:, None], seen] = inverse_root(moment[seen[:, None], seen], like)
    return roots[kind_of]


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias[:, None]
