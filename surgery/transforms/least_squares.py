"""Least squares of a latent layer's output: Gauss-Newton steps, each solved by conjugate gradients.

A closed-form conversion treats keys, values and rotations one after the other. This fits all four matrices of the
latent form together to what the source's attention put out,

    min over (down, query_up, value_up, o) of  Σ_m ‖F^{1/2} (out_m - target_m)‖²,

with F the second moment of the loss gradient at the output. Every step linearises the layer (softmax included) and
solves the normal equations ``(JᵀJ + λ) δ = Jᵀ residual`` by products with J and Jᵀ alone; nothing of the size of
JᵀJ exists.
It is a layer-by-layer solve on calibration statistics, with no gradient descent and no loss of the whole model in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.families.rope import phases, to_complex, to_real
from surgery.kernels.mla_decode.reference import causal_mask
from surgery.transforms.algebra import psd_powers, relative
from surgery.transforms.conjugate_gradients import solve
from surgery.transforms.latent_layer import LatentLayer

# Directions with less than this share of the largest energy are not blown up: little was seen there.
SEEN_FLOOR = 1e-4
PROBED = 4  # one block in so many tells how the kinds of unknowns compare
BLOCKS = 4  # per sequence; more save little and cost calls
SMALLEST_WEIGHT = 1e-20  # attention below it is set to zero: denormals slow products down tenfold on CPUs


@dataclass
class Parameters:
    """The fitted matrices, or a change of them, or a gradient."""

    down: Tensor  # [r + ρ, D (+ 1 with biases)]
    query_up: Tensor  # [H, d, r + ρ]
    value_up: Tensor  # [H, e, r]
    o: Tensor  # [D, H, e]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.down, self.query_up, self.value_up, self.o

    def plus(self, factor: float | Tensor, other: Parameters) -> Parameters:
        """``self + factor * other``."""
        return Parameters(*(a + factor * b for a, b in zip(self.tensors(), other.tensors(), strict=True)))

    def dot(self, other: Parameters) -> float:
        return float(sum((a.double() * b.double()).sum() for a, b in zip(self.tensors(), other.tensors(), strict=True)))


@dataclass(frozen=True)
class Block:
    """Some query positions of one sequence, ascending [M]; keys beyond the last are out of its sight."""

    sequence: int
    positions: Tensor


@dataclass
class Linearisation:
    """One block of the problem around the current parameters.

    Legend: M sampled positions, T tokens up to the last of them, c = r + ρ.
    """

    layer: LatentLayer
    parameters: Parameters
    x: Tensor  # [T, D (+ 1)] inputs
    q: Tensor  # [H, M, d] source queries
    phase: Tensor  # complex [T, ρ/2]
    positions: Tensor  # [M]
    gain: Tensor | None  # [H, 1, T]
    root: Tensor  # [D, D], F^{1/2}

    def __post_init__(self):
        p, scale = self.parameters, self.layer.source.scale
        self.rank = self.layer.rank
        self.query_phase = self.phase[self.positions]
        self.query = self._rotate(self.q @ p.query_up, self.query_phase) * scale  # [H, M, c]
        self.key = self._rotate(self.x @ p.down.mT, self.phase)  # [T, c]
        self.latent = self.key[:, : self.rank]
        logits = self._with_gain(self.query @ self.key.mT)
        tokens = len(self.x)
        visible = causal_mask(tokens, tokens, self.layer.source.window, self.x.device)[self.positions]
        self.weights = logits.masked_fill_(~visible, -torch.inf).softmax(-1)  # [H, M, T]
        self.weights.masked_fill_(self.weights < SMALLEST_WEIGHT, 0)
        self.mixed = self.weights @ self.latent  # [H, M, r]
        self.heads = self.mixed @ p.value_up.mT  # [H, M, e]

    def output(self) -> Tensor:
        """Output at the sampled positions without its bias, times F^{1/2}, [M, D]."""
        return torch.einsum("hme,dhe->md", self.heads, self.parameters.o) @ self.root

    def jvp(self, change: Parameters) -> Tensor:
        """Change of :meth:`output` with a change of the parameters, [M, D]."""
        p = self.parameters
        key_change = self.x @ change.down.mT
        logits = self._rotate(self.q @ change.query_up, self.query_phase).mul_(self.layer.source.scale) @ self.key.mT
        logits += self.query @ self._rotate(key_change, self.phase).mT
        mixed = self._softmax_change(self._with_gain(logits)) @ self.latent + self.weights @ key_change[:, : self.rank]
        heads = mixed @ p.value_up.mT + self.mixed @ change.value_up.mT
        out = torch.einsum("hme,dhe->md", heads, p.o) + torch.einsum("hme,dhe->md", self.heads, change.o)
        return out @ self.root

    def vjp(self, out: Tensor) -> Parameters:
        """The transpose of :meth:`jvp`."""
        query, key, value_up, o = self._signals(out)
        return Parameters(key.mT @ self.x, self.q.mT @ query, value_up, o)

    def latent_signals(self, out: Tensor) -> Tensor:
        """The gradient at the latents of all T tokens, [T, r], of ``out`` [M, D] times :meth:`output`."""
        return self._signals(out)[1][:, : self.rank]

    def _signals(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients at queries [H, M, c] and keys [T, c], both before their rotation, ``value_up`` and ``o``."""
        p = self.parameters
        out = out @ self.root.mT
        o = torch.einsum("md,hme->dhe", out, self.heads)
        heads = torch.einsum("md,dhe->hme", out, p.o)
        value_up = heads.mT @ self.mixed
        mixed = heads @ p.value_up
        logits = self._with_gain(self._softmax_change(mixed @ self.latent.mT))
        query = self._rotate(logits @ self.key, self.query_phase.conj()) * self.layer.source.scale
        key = self._rotate(logits.flatten(0, 1).mT @ self.query.flatten(0, 1), self.phase.conj())
        key[:, : self.rank] += self.weights.flatten(0, 1).mT @ mixed.flatten(0, 1)
        return query, key, value_up, o

    def _softmax_change(self, logits: Tensor) -> Tensor:
        """The softmax's Jacobian, which is symmetric, applied to ``logits`` in place."""
        mean = (self.weights * logits).sum(-1, keepdim=True)
        return logits.sub_(mean).mul_(self.weights)

    def _with_gain(self, logits: Tensor) -> Tensor:
        return logits if self.gain is None else logits.mul_(self.gain)

    def _rotate(self, z: Tensor, phase: Tensor) -> Tensor:
        """Rotates the last ρ of c numbers."""
        if phase.shape[-1] == 0:
            return z
        return torch.cat([z[..., : self.rank], to_real(to_complex(z[..., self.rank :]) * phase)], dim=-1)


@dataclass
class Preconditioner:
    """Symmetric factors on both sides of each block of unknowns, after which their curvatures are alike.

    Conjugate gradients converge by the spread of curvatures. What meets the unknowns on either side is known: inputs,
    queries, attended latents and head outputs on the right of their matrices, the output metric on the left.
    """

    inputs: Tensor  # [D, D], right of down
    queries: Tensor  # [H, d, d], left of query_up
    values: tuple[Tensor, Tensor]  # [H, e, e] and [H, r, r]
    outputs: tuple[Tensor, Tensor]  # [D, D] and [H e, H e]
    scales: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)

    @classmethod
    def of(cls, blocks: list[Linearisation], inputs: Tensor, queries: Tensor) -> Preconditioner:
        """Takes the second moments of a linearised problem; ``inputs`` and ``queries`` are those of all tokens."""
        like, parameters, root = blocks[0].root, blocks[0].parameters, blocks[0].root.double()
        mixed = sum((block.mixed.mT @ block.mixed).double() for block in blocks)
        heads = sum(_gram(block.heads.transpose(0, 1).flatten(1)) for block in blocks)
        o = parameters.o.double()
        metric = torch.einsum("xhe,xy,yhf->hef", o, root @ root, o)

        def inverse_root(moment: Tensor) -> Tensor:
            # Moments of one scale, so that the factors of different blocks differ by their scales alone.
            mean = moment.diagonal(dim1=-2, dim2=-1).mean().clamp_min(torch.finfo(torch.float64).tiny)
            return psd_powers(moment / mean, (-0.5,), floor=SEEN_FLOOR)[0].to(like)

        return cls(
            inverse_root(inputs),
            inverse_root(queries),
            (inverse_root(metric), inverse_root(mixed)),
            (inverse_root(root @ root), inverse_root(heads)),
        )

    def apply(self, p: Parameters) -> Parameters:
        """Whitened unknowns to parameters; its own transpose, so gradients go the other way by it too."""
        down, query_up, value_up, o = self.scales
        return Parameters(
            p.down @ self.inputs * down,
            self.queries @ p.query_up * query_up,
            self.values[0] @ p.value_up @ self.values[1] * value_up,
            (self.outputs[0] @ p.o.flatten(1) @ self.outputs[1] * o).view_as(p.o),
        )

    def balanced(self, blocks: list[Linearisation], gradient: Parameters) -> Preconditioner:
        """With scales that give each kind of unknown the same curvature along its own whitened ``gradient``."""
        plain, scales = replace(self, scales=(1.0,) * 4), []
        whitened = plain.apply(gradient)
        for kind in range(4):
            alone = Parameters(*(t if i == kind else torch.zeros_like(t) for i, t in enumerate(whitened.tensors())))
            raw = plain.apply(alone)
            curvature = sum(float(block.jvp(raw).square().sum()) for block in blocks)
            scales.append((alone.dot(alone) / curvature) ** 0.5 if curvature > 0 else 0.0)
        return replace(self, scales=tuple(scales))


class LatentFit:
    """The least-squares problem of one layer.

    Args:
        layer: where to start, on the device and in the dtype to compute in (float32 or better).
        inputs: [N, T, D] what enters the attention.
        targets: [N, T, D] wanted outputs, the output bias left out.
        metric: F [D, D]; the identity asks for plain output error.
        queries: query positions sampled from each sequence, anew in every step.
        damping: λ relative to the curvature along the gradient.
        seed: of the sampling.
    """

    def __init__(
        self,
        layer: LatentLayer,
        inputs: Tensor,
        targets: Tensor,
        metric: Tensor,
        *,
        queries: int = 256,
        damping: float = 1e-3,
        seed: int = 0,
    ):
        self._layer = layer
        like = layer.down
        self._inputs, self._targets = inputs, targets
        self._biased = layer.down_bias is not None
        (root,) = psd_powers(metric.double(), (0.5,), floor=1e-3)
        self._root = root.to(like)
        self._queries, self._damping = min(queries, inputs.shape[1]), damping
        self._generator = torch.Generator().manual_seed(seed)
        self._phase = phases(layer.inv_freq, torch.arange(inputs.shape[1], device=like.device), like.dtype)
        self._input_moment, self._query_moment = self._input_moments()
        self._preconditioner: Preconditioner | None = None
        down = layer.down if layer.down_bias is None else torch.cat([layer.down, layer.down_bias[:, None]], dim=1)
        self.parameters = self._normalised(Parameters(down, layer.query_up, layer.value_up, layer.o))

    @torch.no_grad()
    def run(self, steps: int, iterations: int) -> tuple[LatentLayer, float, float]:
        """Takes Gauss-Newton steps of so many conjugate-gradient iterations each.

        Returns:
            The fitted layer, and the error before and after the last step on that step's sample, relative to the
            targets' energy in the metric.
        """
        before = after = 0.0
        for _ in range(steps):
            before, after = self._step(iterations)
        p, biased = self.parameters, self._biased
        fitted = replace(
            self._layer,
            down=p.down[:, :-1] if biased else p.down,
            down_bias=p.down[:, -1] if biased else None,
            query_up=p.query_up,
            value_up=p.value_up,
            o=p.o,
        )
        return fitted, before, after

    @torch.no_grad()
    def latent_moments(self) -> tuple[Tensor, Tensor]:
        """What orders the latents of :attr:`parameters`, see :func:`surgery.transforms.latent_order.order_latents`.

        Returns:
            E[c cᵀ] of the latents [r, r] over all tokens, and the Gauss-Newton matrix [r, r] of the output error per
            query position in the metric, errors of different tokens taken for independent. With z ~ N(0, I) in the
            whitened output space, the gradient g = Jᵀ z has E[g gᵀ] = Jᵀ J; one z is drawn for each position of a
            sample. Both float64.
        """
        down, rank = self.parameters.down.double(), self._layer.rank
        total, count = 0, 0
        for block in self._sample():
            out = torch.randn(len(block.positions), len(self._root), generator=self._generator).to(self._root)
            total = total + _gram(self._linearise(self.parameters, block).latent_signals(out))
            count += len(block.positions)
        return (down @ self._input_moment @ down.mT)[:rank, :rank], total / count

    def _step(self, iterations: int) -> tuple[float, float]:
        self.parameters = self._normalised(self.parameters)
        blocks = self._sample()
        linearised = [self._linearise(self.parameters, block) for block in blocks]
        wanted = [self._wanted(block) for block in blocks]
        residuals = [want - part.output() for want, part in zip(wanted, linearised, strict=True)]
        energy = sum(float(want.square().sum()) for want in wanted)
        before = sum(float(residual.square().sum()) for residual in residuals)
        change = self._solve(linearised, residuals, iterations)
        del linearised
        start, factor = self.parameters, 1.0
        for _ in range(4):
            self.parameters = start.plus(factor, change)
            after = self._error(blocks, wanted)
            if after < before:
                return relative(before, energy), relative(after, energy)
            factor /= 2
        self.parameters = start
        return relative(before, energy), relative(before, energy)

    def _solve(self, blocks: list[Linearisation], residuals: list[Tensor], iterations: int) -> Parameters:
        """Conjugate gradients on the damped normal equations in whitened unknowns; returns a change of parameters."""
        # The factors hold for all steps, their scales do not.
        if self._preconditioner is None:
            self._preconditioner = Preconditioner.of(blocks, self._input_moment, self._query_moment)
        raw_gradient = _transposed_product(blocks, residuals)
        preconditioner = self._preconditioner.balanced(blocks[::PROBED], raw_gradient)

        def normal(p: Parameters) -> Parameters:
            raw = preconditioner.apply(p)
            return preconditioner.apply(_transposed_product(blocks, [block.jvp(raw) for block in blocks]))

        solution = solve(
            preconditioner.apply(raw_gradient),
            normal,
            iterations,
            self._damping,
            dot=Parameters.dot,
            plus=Parameters.plus,
        )
        return preconditioner.apply(solution)

    def _error(self, blocks: list[Block], wanted: list[Tensor]) -> float:
        outputs = (self._linearise(self.parameters, block).output() for block in blocks)
        return sum(float((want - out).square().sum()) for want, out in zip(wanted, outputs, strict=True))

    def _wanted(self, block: Block) -> Tensor:
        """Targets at a block's positions in the metric, [M, D]."""
        return self._targets[block.sequence][block.positions.to(self._targets.device)].to(self._root) @ self._root

    def _linearise(self, parameters: Parameters, block: Block) -> Linearisation:
        source = self._layer.source
        tokens = int(block.positions[-1]) + 1
        x = self._inputs[block.sequence, :tokens].to(self._root)
        gain = source.project_key_gain(x)
        if gain is not None:
            gain = gain.T.repeat_interleave(source.heads // source.kv_heads, dim=0)[:, None]
        return Linearisation(
            layer=self._layer,
            parameters=parameters,
            x=self._augmented(x),
            q=source.project_queries(x[block.positions]).transpose(0, 1),
            phase=self._phase[:tokens],
            positions=block.positions,
            gain=gain,
            root=self._root,
        )

    def _sample(self) -> list[Block]:
        """Random query positions of every sequence, in blocks of neighbours so that early ones meet few keys."""
        blocks = []
        for sequence in range(len(self._inputs)):
            order = torch.randperm(self._inputs.shape[1], generator=self._generator)
            positions = order[: self._queries].sort().values.to(self._root.device)
            blocks += [Block(sequence, part) for part in positions.chunk(BLOCKS)]
        return blocks

    def _augmented(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_ones(len(x), 1)], dim=-1) if self._biased else x

    def _input_moments(self) -> tuple[Tensor, Tensor]:
        """Second moments of the inputs and of each head's queries, float64."""
        total, queries, count = 0, 0, 0
        for sequence in self._inputs:
            x = sequence.to(self._layer.down)
            q = self._layer.source.project_queries(x).transpose(0, 1)
            x = self._augmented(x)
            total = total + (x.mT @ x).double()
            queries = queries + (q.mT @ q).double()
            count += len(x)
        return total / count, queries / count

    def _normalised(self, p: Parameters) -> Parameters:
        """The same layer in another basis: a latent of unit covariance, rotary pairs of unit energy."""
        rank = self._layer.rank
        down = p.down.double()
        covariance = down @ self._input_moment @ down.mT
        root, inverse = psd_powers(covariance[:rank, :rank], (0.5, -0.5))
        energy = covariance.diagonal()[rank:].view(2, -1).mean(0).clamp_min(1e-18).sqrt().repeat(2)
        query_up = p.query_up.double()
        return Parameters(
            torch.cat([inverse @ down[:rank], down[rank:] / energy[:, None]]).to(p.down),
            torch.cat([query_up[..., :rank] @ root, query_up[..., rank:] * energy], dim=-1).to(p.down),
            (p.value_up.double() @ root).to(p.down),
            p.o,
        )


def _transposed_product(blocks: list[Linearisation], outs: list[Tensor]) -> Parameters:
    total = None
    for block, out in zip(blocks, outs, strict=True):
        gradient = block.vjp(out)
        total = gradient if total is None else total.plus(1.0, gradient)
    return total


def _gram(rows: Tensor) -> Tensor:
    return (rows.mT @ rows).double()
