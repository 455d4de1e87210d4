"""Gauss-Newton fits of an attention layer to wanted outputs, whatever its queries, keys and values are made of.

A fit minimises ``Σ_m ‖F^{1/2} (out_m - target_m)‖²`` over the unknowns behind q, k, v and o, with F the second moment
of the loss gradient at the output. Every step linearises the layer, softmax included, on query positions sampled anew,
and solves the damped normal equations by conjugate gradients in whitened unknowns: products with J and Jᵀ, nothing of
the size of JᵀJ. The derivative of attention itself is here; how queries, keys and values hang on the unknowns is the
structure's own (:mod:`surgery.transforms.kv_heads_fit`, :mod:`surgery.transforms.low_rank_fit`,
:mod:`surgery.transforms.latent_fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from surgery.calibration.parts import Parts
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.rope import to_complex, to_real
from surgery.kernels.mla_decode.reference import causal_mask
from surgery.running.activations import give_back, in_file
from surgery.running.processes import ALONE, Processes
from surgery.transforms.algebra import psd_powers, relative
from surgery.transforms.conjugate_gradients import solve
from surgery.transforms.effort import Effort
from surgery.transforms.fit_blocks import Blocks, Place, sample_blocks

SEEN_FLOOR = 1e-4
"""Directions with less than this share of the largest energy are not blown up: little was seen there."""
PROBED = 4
"""One block in so many tells how the kinds of unknowns compare."""
SMALLEST_WEIGHT = 1e-20
"""Attention below it is set to zero: denormals slow products down tenfold on CPUs."""

Weights = TypeVar("Weights", bound=NamedTuple)
Whiten = Callable[[Tensor], Tensor]
"""Whitened unknowns to unknowns, flat; symmetric, and never mixing two kinds of unknowns."""


class Linearised(Protocol):
    """M query positions of one sequence around the current unknowns, which are one flat vector."""

    out: LinearisedOutput

    def jvp(self, vector: Tensor) -> Tensor:
        """Change of the output times F^{1/2}, [M, D], with a change of the unknowns."""

    def vjp(self, out: Tensor) -> Tensor:
        """The transpose of :meth:`jvp`."""


Linearise = Callable[[Any, int, Tensor], Linearised]
"""Unknowns by kind, the number of a sequence and ascending query positions [M] of it."""


class LinearisedMixing:
    """How some query positions mix values, around some queries, keys and values, all of them before the rotation.

    Legend: M positions, T tokens up to the last of them, G KV heads, H query heads, R of them to a KV head.

    Args:
        source: for its window and softmax.
        q: [H, M, d] queries of the positions. k: [G, T, d]. v: [G, T, e].
        phase: complex [T, n]: the last 2 n numbers of queries and keys rotate.
        positions: [M], ascending; the last one is T - 1.
        gain: [H, 1, T] factors of the products of queries and keys, if there are any.

    Attributes:
        mixed: [G, R, M, e].
        gain: factors of changes of the products, the slope of a cap among them, [G, R, M or 1, T].
    """

    def __init__(
        self,
        source: AttentionAnatomy,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        phase: Tensor,
        positions: Tensor,
        gain: Tensor | None = None,
    ):
        self.phase, self.scale, self.groups = phase, source.scale, (len(k), -1)
        self.query_phase = phase[positions]
        self.gain = None if gain is None else gain.unflatten(0, self.groups)
        self.q = self._queries(q)  # [G, R, M, d]
        self.k, self.v = _turned(k, phase)[:, None], v[:, None]  # [G, 1, T, ·]
        visible = causal_mask(len(phase), len(phase), source.window, q.device)[positions]
        softmax = replace(source.softmax, scale=1.0)  # queries are scaled already
        logits = softmax.logits(self._with_gain(self.q @ self.k.mT))
        if softmax.softcap is not None:
            slope = softmax.slope(logits)
            self.gain = slope if self.gain is None else slope.mul_(self.gain)
        logits = logits.masked_fill_(~visible, -torch.inf).flatten(0, 1)
        self.weights = softmax.normalised(logits).unflatten(0, self.groups)  # [G, R, M, T]
        self.weights.masked_fill_(self.weights < SMALLEST_WEIGHT, 0)
        self.mixed = self.weights @ self.v

    def jvp(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Change of :attr:`mixed` with changes of what it was made from."""
        logits = self._queries(q) @ self.k.mT
        logits += self.q @ _turned(k, self.phase)[:, None].mT
        return self._softmax_change(self._with_gain(logits)) @ self.v + self.weights @ v[:, None]

    def vjp(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose of :meth:`jvp`: q [H, M, d], k and v [G, T, ·]."""
        logits = self._with_gain(self._softmax_change(mixed @ self.v.mT))
        q = _turned((logits @ self.k).flatten(0, 1) * self.scale, self.query_phase.conj())
        # One product over heads and positions together, where values and keys are one head's.
        k = _turned(logits.flatten(1, 2).mT @ self.q.flatten(1, 2), self.phase.conj())
        return q, k, self.weights.flatten(1, 2).mT @ mixed.flatten(1, 2)

    def _queries(self, q: Tensor) -> Tensor:
        return _turned(q, self.query_phase).unflatten(0, self.groups) * self.scale

    def _softmax_change(self, logits: Tensor) -> Tensor:
        """The softmax's Jacobian, which is symmetric, applied to ``logits`` in place."""
        return logits.sub_((self.weights * logits).sum(-1, keepdim=True)).mul_(self.weights)

    def _with_gain(self, logits: Tensor) -> Tensor:
        return logits if self.gain is None else logits.mul_(self.gain)


class LinearisedOutput:
    """The output projection around some head outputs [H, M, e] and o [D, H, e], in the metric.

    Args:
        root: F^{1/2} [D, D].
        gate: factors on the heads [H, M, e], which do not change; None without a gate.

    Attributes:
        heads: what ``o`` reads, behind the gate.
    """

    def __init__(self, heads: Tensor, o: Tensor, root: Tensor, gate: Tensor | None = None):
        self.o, self.root, self.gate = o, root, gate
        self.heads = self._gated(heads)

    def value(self) -> Tensor:
        """Output at the positions without its bias, times F^{1/2}, [M, D]."""
        return self._of(self.heads, self.o)

    def jvp(self, heads: Tensor, o: Tensor) -> Tensor:
        """Change of :meth:`value`, [M, D]."""
        return self._of(self._gated(heads), self.o) + self._of(self.heads, o)

    def vjp(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """The transpose of :meth:`jvp`: heads [H, M, e], o [D, H, e]."""
        out = out @ self.root.mT
        heads = self._gated(torch.einsum("mx,xhe->hme", out, self.o))
        return heads, torch.einsum("mx,hme->xhe", out, self.heads)

    def _gated(self, heads: Tensor) -> Tensor:
        return heads if self.gate is None else heads * self.gate

    def _of(self, heads: Tensor, o: Tensor) -> Tensor:
        return torch.einsum("hme,xhe->mx", heads, o) @ self.root


class LinearisedAttention:
    """Attention whose mixed values are its heads: :class:`LinearisedMixing`, then :class:`LinearisedOutput`.

    Args:
        o, root, gate: of the second.

    Attributes:
        out: the second of them.
    """

    def __init__(self, mixing: LinearisedMixing, o: Tensor, root: Tensor, gate: Tensor | None = None):
        self.mixing = mixing
        self.out = LinearisedOutput(mixing.mixed.flatten(0, 1), o, root, gate)

    def jvp(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        """Change of the output in the metric with changes of what it was made from, [M, D]."""
        return self.out.jvp(self.mixing.jvp(q, k, v).flatten(0, 1), o)

    def vjp(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The transpose of :meth:`jvp`: q [H, M, d], k and v [G, T, ·], o [D, H, e]."""
        heads, o = self.out.vjp(out)
        return *self.mixing.vjp(heads.unflatten(0, self.mixing.groups)), o


@dataclass(frozen=True)
class Wanted:
    """What a layer is to put out, and how what it misses counts.

    Attributes:
        targets: [N, T, D] without the output bias, on any device. Where they lie in a file, past the limit of
            activations, nothing of all sequences is kept, and blocks are linearised whenever they are used.
        root: F^{1/2} [D, D], on the device and in the dtype to compute in.
    """

    targets: Tensor
    root: Tensor

    def at(self, place: Place) -> Tensor:
        """At some positions, times F^{1/2}."""
        found = self.targets[place.sequence, place.positions.to(self.targets.device)].to(self.root) @ self.root
        give_back(self.targets)
        return found


def fit_attention(
    start: Weights,
    linearise: Linearise,
    whitening: Callable[[Blocks[Linearised]], Whiten],
    wanted: Wanted,
    effort: Effort,
    damping: float,
    processes: Processes = ALONE,
) -> tuple[Weights, float, float]:
    """Gauss-Newton steps from ``start``; a step is shortened until the error falls, or not taken.

    Args:
        start: the unknowns, by kind.
        linearise: the layer at some query positions.
        whitening: from the linearised blocks of the first step to the preconditioner of all steps.
        damping: relative to the curvature along the gradient.
        processes: that share the sequences; all call this with the same arguments, and end with the same bits.

    Returns:
        The fitted unknowns, and the error before and after the last step on its sample, relative to the targets'
        energy.
    """
    targets, unknowns = wanted.targets, flat(start)
    generator, parts = torch.Generator().manual_seed(effort.seed), Parts(len(targets), 1, processes)
    keep = processes.from_main(lambda: not in_file(targets))
    whiten, before, after = None, 0.0, 0.0
    for _ in range(effort.steps):
        places = sample_blocks(parts, targets.shape[:2], effort.queries, generator, wanted.root.device, keep=keep)
        outputs, blocks = places.map(wanted.at), places.map(partial(_linearised, linearise, unflat(unknowns, start)))
        residuals = outputs.map(_residual, blocks)
        energy, before = outputs.total(_energy), residuals.total(_energy)
        whiten = whiten or whitening(blocks)
        kinds = [weight.numel() for weight in start]
        change = _solve(blocks, residuals, whiten, kinds, effort.iterations, damping)
        del blocks, residuals
        after = before
        for factor in (1.0, 0.5, 0.25, 0.125):  # shorter where the linearisation does not reach
            trial = unknowns + factor * change
            error = places.total(partial(_error, linearise, unflat(trial, start)), outputs)
            if error < before:
                unknowns, after = trial, error
                break
        before, after = relative(before, energy), relative(after, energy)
    return unflat(unknowns, start), before, after


def _linearised(linearise: Linearise, weights: Weights, place: Place) -> Linearised:
    return linearise(weights, place.sequence, place.positions)


def _error(linearise: Linearise, weights: Weights, place: Place, wanted: Tensor) -> float:
    return _energy(_residual(wanted, _linearised(linearise, weights, place)))


def _residual(wanted: Tensor, block: Linearised) -> Tensor:
    return wanted - block.out.value()


def _solve(
    blocks: Blocks[Linearised],
    residuals: Blocks[Tensor],
    whiten: Whiten,
    kinds: list[int],
    iterations: int,
    damping: float,
) -> Tensor:
    """Conjugate gradients on the damped normal equations in whitened unknowns: a flat change of the unknowns."""
    raw_gradient = blocks.total(lambda block, residual: block.vjp(residual), residuals)
    scales = _balance(blocks, whiten(raw_gradient), whiten, kinds)

    def scaled(vector: Tensor) -> Tensor:
        parts = whiten(vector).split(kinds)
        return torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)])

    def normal(vector: Tensor) -> Tensor:
        raw = blocks.agreed(lambda: scaled(vector))
        return scaled(blocks.total(lambda block: block.vjp(block.jvp(raw))))

    solution = solve(
        scaled(raw_gradient),
        normal,
        iterations,
        damping,
        dot=lambda one, other: float(one.double() @ other.double()),
        plus=lambda one, factor, other: one + factor * other,
    )
    return blocks.agreed(lambda: scaled(solution))


def _balance(blocks: Blocks[Linearised], gradient: Tensor, whiten: Whiten, kinds: list[int]) -> list[float]:
    """A factor for each kind of unknowns that gives all the same curvature along their own whitened ``gradient``."""
    scales, parts = [], gradient.split(kinds)
    for kind in range(len(kinds)):
        alone = torch.cat([part if i == kind else torch.zeros_like(part) for i, part in enumerate(parts)])
        raw = whiten(alone)
        curvature = blocks.total(lambda block, raw=raw: _energy(block.jvp(raw)), every=PROBED)
        scales.append((_energy(alone) / curvature) ** 0.5 if curvature > 0 else 0.0)
    return scales


def gates(source: AttentionAnatomy, x: Tensor) -> Tensor | None:
    """What a layer's gate lets through [H, M, e] of inputs [M, D]; None without one."""
    return None if source.gate is None else source.open_gate(x).transpose(0, 1)


def flat(weights: Iterable[Tensor]) -> Tensor:
    """All numbers in one vector."""
    return torch.cat([weight.flatten() for weight in weights])


def unflat(vector: Tensor, like: Weights) -> Weights:
    """The inverse of :func:`flat`, in the shapes of ``like``."""
    parts = vector.split([weight.numel() for weight in like])
    return like._make(part.view_as(weight) for part, weight in zip(parts, like, strict=True))


SMALLEST_MEAN = 1e-200
"""What a moment is divided by is at least this, or the moment counts as zeros."""


def inverse_root(moment: Tensor, like: Tensor) -> Tensor:
    """``moment^{-1/2}`` [..., n, n] up to a factor, with rarely seen directions kept small; as ``like`` is."""
    # Moments of one scale, so that the factors of different kinds differ by their scales alone.
    # Of inputs that hardly differ rounding is all there is, and may be negative.
    mean = moment.diagonal(dim1=-2, dim2=-1).abs().mean()
    mean = torch.where(mean > SMALLEST_MEAN, mean, 1.0)
    return psd_powers(moment / mean, (-0.5,), floor=SEEN_FLOOR)[0].to(like)


def heads_moment(blocks: Blocks[Linearised]) -> Tensor:
    """What the output projection reads, summed over positions: [H e, H e], float64."""
    return blocks.total(lambda block: gram(block.out.heads.transpose(0, 1).flatten(1)))


def gram(rows: Tensor) -> Tensor:
    """Second moment [..., n, n] of rows [..., m, n], summed, float64; the product itself is in the rows' dtype."""
    return (rows.mT @ rows).double()


def _turned(x: Tensor, phase: Tensor) -> Tensor:
    """Rotates the last numbers, as many as there are phases for."""
    rotated = 2 * phase.shape[-1]
    if not rotated:
        return x
    content, rope = x.split([x.shape[-1] - rotated, rotated], dim=-1)
    rope = to_real(to_complex(rope) * phase).to(x)
    return torch.cat([content, rope], dim=-1) if content.shape[-1] else rope


def _energy(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
