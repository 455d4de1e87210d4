"""Fits a layer of plain grouped-query attention to wanted outputs: Gauss-Newton steps over all of its projections."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from surgery.anatomy import AttentionAnatomy
from surgery.kernels.mla_decode.reference import causal_mask
from surgery.rope import phases, to_complex, to_real
from surgery.transforms.algebra import psd_powers
from surgery.transforms.conjugate_gradients import solve
from surgery.transforms.head_grouping import affine
from surgery.transforms.least_squares import BLOCKS, PROBED, SEEN_FLOOR, SMALLEST_WEIGHT


@torch.no_grad()
def fit_merged_layer(
    layer: AttentionAnatomy,
    inputs: Tensor,
    targets: Tensor,
    metric: Tensor,
    *,
    steps: int = 3,
    iterations: int = 8,
    queries: int = 256,
    damping: float = 1e-3,
    seed: int = 0,
) -> tuple[AttentionAnatomy, float, float]:
    """Fits q, k, v and o together (biases too, the output's left alone) to wanted outputs.

    Minimises ``Σ_m ‖F^{1/2} (out_m - target_m)‖²`` by Gauss-Newton steps, each solved by conjugate gradients, as
    :class:`surgery.transforms.least_squares.LatentFit` does for a latent layer.

    Args:
        layer: where to start, without q/k-norms, on the device and in the dtype to compute in (float32 or better).
        inputs: [N, T, D] what enters the attention.
        targets: [N, T, D] wanted outputs, the output bias left out.
        metric: F [D, D], second moment of the loss gradient at the output.
        steps, iterations: Gauss-Newton steps, conjugate-gradient iterations in each.
        queries: query positions sampled from each sequence, anew in every step.
        damping: relative to the curvature along the gradient.
        seed: of the sampling.

    Returns:
        The fitted layer, and the error before and after the last step on its sample, relative to the targets' energy.
    """
    (root,) = psd_powers(metric.double(), (0.5,), floor=1e-3)
    root, device, tokens = root.to(layer.k), layer.k.device, inputs.shape[1]
    phase = phases(layer.inv_freq, torch.arange(tokens, device=device), layer.k.dtype)
    moment = sum(_gram(pad(x.to(layer.k), (0, 1), value=1.0)) for x in inputs) / inputs.shape[:2].numel()
    generator = torch.Generator().manual_seed(seed)
    weights, preconditioner, before, after = _Weights.of(layer), None, 0.0, 0.0

    def linearise(weights: _Weights, sequence: int, positions: Tensor) -> _Linearisation:
        seen = int(positions[-1]) + 1
        x = pad(inputs[sequence, :seen].to(layer.k), (0, 1), value=1.0)
        return _Linearisation(layer, weights, x, phase[:seen], positions, root)

    for _ in range(steps):
        blocks = []
        for sequence in range(len(inputs)):
            order = torch.randperm(tokens, generator=generator)
            positions = order[:queries].sort().values.to(device)
            blocks += [(sequence, part) for part in positions.chunk(BLOCKS)]
        wanted = [targets[row, positions.to(targets.device)].to(root) @ root for row, positions in blocks]
        linearised = [linearise(weights, *block) for block in blocks]
        residuals = [want - part.output() for want, part in zip(wanted, linearised, strict=True)]
        energy, before = sum(map(_energy, wanted)), sum(map(_energy, residuals))
        preconditioner = preconditioner or _Preconditioner(layer, weights, linearised, moment, root)
        change = _solve(linearised, residuals, preconditioner, iterations, damping)
        del linearised
        after = before
        for factor in (1.0, 0.5, 0.25, 0.125):  # shorter where the linearisation does not reach
            trial = weights.unflat(weights.flat() + factor * change)
            outputs = (linearise(trial, *block).output() for block in blocks)
            error = sum(_energy(want - out) for want, out in zip(wanted, outputs, strict=True))
            if error < before:
                weights, after = trial, error
                break
        before, after = before / energy, after / energy
    return weights.put_into(layer), before, after


class _Weights(NamedTuple):
    """The fitted matrices, or a change of them, or a gradient. A bias is one more input channel, which is always 1."""

    q: Tensor  # [H, d, D (+ 1)]
    k: Tensor  # [G, d, D (+ 1)]
    v: Tensor  # [G, e, D (+ 1)]
    o: Tensor  # [D, H, e]

    @classmethod
    def of(cls, layer: AttentionAnatomy) -> _Weights:
        q, k, v = (affine(getattr(layer, name), getattr(layer, name + "_bias")) for name in "qkv")
        return cls(q, k, v, layer.o)

    def put_into(self, layer: AttentionAnatomy) -> AttentionAnatomy:
        changed = {"o": self.o}
        for name, weight in zip("qkv", self, strict=False):
            changed[name] = weight[..., : layer.hidden].contiguous()
            if weight.shape[-1] > layer.hidden:
                changed[name + "_bias"] = weight[..., layer.hidden].contiguous()
        return replace(layer, **changed)

    def flat(self) -> Tensor:
        """All numbers in one vector."""
        return torch.cat([weight.flatten() for weight in self])

    def unflat(self, vector: Tensor) -> _Weights:
        """The inverse of :meth:`flat`, in the shapes of this one."""
        parts = vector.split([weight.numel() for weight in self])
        return _Weights(*(part.view_as(weight) for part, weight in zip(parts, self, strict=True)))


class _Linearisation:
    """Some query positions of one sequence around the current weights.

    Legend: M positions, T tokens up to the last of them, G KV heads, R query heads of each.
    """

    def __init__(
        self, layer: AttentionAnatomy, weights: _Weights, x: Tensor, phase: Tensor, positions: Tensor, root: Tensor
    ):
        self.weights, self.x, self.phase, self.root, self.scale = weights, x, phase, root, layer.scale
        self.asking, self.query_phase = x[positions], phase[positions]
        self.groups = (layer.kv_heads, -1)
        self.q = self._queries(weights.q)  # [G, R, M, d]
        self.k = _turned(_projected(x, weights.k), phase)[:, None]  # [G, 1, T, d]
        self.v = _projected(x, weights.v)[:, None]
        visible = causal_mask(len(x), len(x), layer.window, x.device)[positions]
        self.attention = (self.q @ self.k.mT).masked_fill_(~visible, -torch.inf).softmax(-1)  # [G, R, M, T]
        self.attention.masked_fill_(self.attention < SMALLEST_WEIGHT, 0)
        self.heads = self.attention @ self.v  # [G, R, M, e]

    def output(self) -> Tensor:
        """Output at the positions without its bias, times F^{1/2}, [M, D]."""
        return self._out(self.heads, self.weights.o)

    def jvp(self, vector: Tensor) -> Tensor:
        """Change of :meth:`output` with a flat change of the weights, [M, D]."""
        change = self.weights.unflat(vector)
        logits = self._queries(change.q) @ self.k.mT
        logits += self.q @ _turned(_projected(self.x, change.k), self.phase)[:, None].mT
        heads = self._softmax_change(logits) @ self.v + self.attention @ _projected(self.x, change.v)[:, None]
        return self._out(heads, self.weights.o) + self._out(self.heads, change.o)

    def vjp(self, out: Tensor) -> Tensor:
        """The transpose of :meth:`jvp`."""
        out = out @ self.root.mT
        o = torch.einsum("mx,hme->xhe", out, self.heads.flatten(0, 1))
        heads = torch.einsum("mx,xhe->hme", out, self.weights.o).unflatten(0, self.groups)
        logits = self._softmax_change(heads @ self.v.mT)
        q = _turned((logits @ self.k).flatten(0, 1) * self.scale, self.query_phase.conj())
        k = _turned((logits.mT @ self.q).sum(1), self.phase.conj())
        v = (self.attention.mT @ heads).sum(1)
        q, k, v = (
            part.mT @ x[:, : weight.shape[-1]]
            for part, x, weight in zip((q, k, v), (self.asking, self.x, self.x), self.weights, strict=False)
        )
        return _Weights(q, k, v, o).flat()

    def _queries(self, weight: Tensor) -> Tensor:
        return _turned(_projected(self.asking, weight), self.query_phase).unflatten(0, self.groups) * self.scale

    def _out(self, heads: Tensor, o: Tensor) -> Tensor:
        return torch.einsum("hme,xhe->mx", heads.flatten(0, 1), o) @ self.root

    def _softmax_change(self, logits: Tensor) -> Tensor:
        """The softmax's Jacobian, which is symmetric, applied to ``logits`` in place."""
        return logits.sub_((self.attention * logits).sum(-1, keepdim=True)).mul_(self.attention)


class _Preconditioner:
    """Symmetric factors on both sides of each kind of unknowns, after which their curvatures are alike.

    On the right stand the inputs that meet a matrix; on the left what its result meets: the energies of keys for
    queries and of queries for keys, one number a pair as rotation mixes no others, and the output metric for values.
    """

    def __init__(
        self, layer: AttentionAnatomy, weights: _Weights, blocks: list[_Linearisation], moment: Tensor, root: Tensor
    ):
        metric, o = (root @ root).double(), weights.o.double()
        groups, repeat = layer.kv_heads, layer.heads // layer.kv_heads

        def inverse_root(moment: Tensor) -> Tensor:
            mean = moment.diagonal(dim1=-2, dim2=-1).mean().clamp_min(torch.finfo(torch.float64).tiny)
            return psd_powers(moment / mean, (-0.5,), floor=SEEN_FLOOR)[0].to(root)

        def pair_energy(weight: Tensor) -> Tensor:  # [h, d, 1]
            rows, size = weight.double(), weight.shape[-1]
            re, im = ((rows @ moment[:size, :size]) * rows).sum(-1, keepdim=True).chunk(2, dim=1)
            return (re + im).clamp_min(1e-18).repeat(1, 2, 1)

        sizes = [weight.shape[-1] for weight in weights[:3]]
        factors = {size: inverse_root(moment[:size, :size]) for size in set(sizes)}
        self.inputs = [factors[size] for size in sizes]
        self.query = pair_energy(weights.k).rsqrt().repeat_interleave(repeat, dim=0).to(root)
        self.key = pair_energy(weights.q).unflatten(0, (groups, repeat)).sum(1).rsqrt().to(root)
        met = torch.einsum("xhe,xy,yhf->hef", o, metric, o).unflatten(0, (groups, repeat)).sum(1)
        self.value = inverse_root(met)
        heads = sum(_gram(block.heads.flatten(0, 1).transpose(0, 1).flatten(1)) for block in blocks)
        self.heads, self.outputs = inverse_root(heads), inverse_root(metric)
        self.weights, self.scales = weights, (1.0,) * 4

    def apply(self, vector: Tensor) -> Tensor:
        """Whitened unknowns to weights; its own transpose, so gradients go the other way by it too."""
        p, (q, k, v) = self.weights.unflat(vector), self.inputs
        o = self.outputs @ p.o.flatten(1) @ self.heads
        parts = (self.query * p.q @ q, self.key * p.k @ k, self.value @ p.v @ v, o)
        return torch.cat([part.flatten() * scale for part, scale in zip(parts, self.scales, strict=True)])

    def balance(self, blocks: list[_Linearisation], gradient: Tensor) -> None:
        """Scales the kinds of unknowns so that each has the same curvature along its own whitened gradient."""
        self.scales, scales = (1.0,) * 4, []
        whitened = self.weights.unflat(self.apply(gradient))
        for kind in range(4):
            alone = _Weights(*(t if i == kind else torch.zeros_like(t) for i, t in enumerate(whitened))).flat()
            raw = self.apply(alone)
            curvature = sum(_energy(block.jvp(raw)) for block in blocks)
            scales.append((_energy(alone) / curvature) ** 0.5 if curvature > 0 else 0.0)
        self.scales = tuple(scales)


def _solve(
    blocks: list[_Linearisation],
    residuals: list[Tensor],
    preconditioner: _Preconditioner,
    iterations: int,
    damping: float,
) -> Tensor:
    """Conjugate gradients on the damped normal equations in whitened unknowns: a flat change of the weights."""
    raw_gradient = sum(block.vjp(residual) for block, residual in zip(blocks, residuals, strict=True))
    preconditioner.balance(blocks[::PROBED], raw_gradient)

    def normal(vector: Tensor) -> Tensor:
        raw = preconditioner.apply(vector)
        return preconditioner.apply(sum(block.vjp(block.jvp(raw)) for block in blocks))

    solution = solve(
        preconditioner.apply(raw_gradient),
        normal,
        iterations,
        damping,
        dot=lambda one, other: float(one.double() @ other.double()),
        plus=lambda one, factor, other: one + factor * other,
    )
    return preconditioner.apply(solution)


def _projected(x: Tensor, weight: Tensor) -> Tensor:
    """Inputs [T, D + 1], the last always 1, through weights [h, d, D] or, with a bias, [h, d, D + 1]: [h, T, d]."""
    return x[:, : weight.shape[-1]] @ weight.mT


def _turned(x: Tensor, phase: Tensor) -> Tensor:
    return to_real(to_complex(x) * phase)


def _gram(rows: Tensor) -> Tensor:
    return (rows.mT @ rows).double()


def _energy(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
