"""Fits a layer in latent form to wanted outputs by Gauss-Newton steps over its four matrices.

A closed-form conversion treats keys, values and rotations one after the other. This fits them together to what the
source's attention put out. It is a layer-by-layer solve on calibration text, with no gradient descent and no loss of
the whole model in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from surgery.calibration.parts import Parts
from surgery.families.rope import phases
from surgery.running.processes import ALONE, Processes
from surgery.transforms.algebra import psd_powers
from surgery.transforms.attention_fit import (
    LinearisedMixing,
    LinearisedOutput,
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
from surgery.transforms.fit_blocks import Blocks, Place, sample_blocks
from surgery.transforms.head_grouping import affine
from surgery.transforms.latent_layer import LatentLayer


@torch.no_grad()
def fit_latent_layer(
    layer: LatentLayer,
    inputs: Tensor,
    targets: Tensor,
    metric: Tensor,
    effort: Effort = USUAL,
    *,
    damping: float = 1e-3,
    processes: Processes = ALONE,
) -> tuple[LatentLayer, float, float]:
    """Fits down, query_up, value_up and o together to wanted outputs; queries, norms and window stay the source's.

    Minimises ``Σ_m ‖F^{1/2} (out_m - target_m)‖²`` as :func:`surgery.transforms.attention_fit.fit_attention` does. The
    fitted latents have unit covariance and no order: see :func:`surgery.transforms.latent_order.order_latents`.

    Args:
        layer: where to start, on the device and in the dtype to compute in (float32 or better).
        inputs: [N, T, D] what enters the attention.
        targets: [N, T, D] wanted outputs, the output bias left out.
        metric: F [D, D], second moment of the loss gradient at the output; the identity asks for plain output error.
        damping: relative to the curvature along the gradient.
        processes: that share the sequences, see :func:`surgery.transforms.attention_fit.fit_attention`.

    Returns:
        The fitted layer, and the error before and after the last step on its sample, relative to the targets' energy.
    """
    layer = _normalised(layer, inputs)
    start, root = _Weights.of(layer), _root(layer, metric)
    fitted, before, after = fit_attention(
        start,
        _Problem(layer, inputs, root).linearise,
        lambda blocks: _Preconditioner(layer, start, blocks, inputs, root).apply,
        Wanted(targets, root),
        effort,
        damping,
        processes,
    )
    return fitted.put_into(layer), before, after


@torch.no_grad()
def latent_moments(layer: LatentLayer, inputs: Tensor, metric: Tensor, effort: Effort = USUAL) -> tuple[Tensor, Tensor]:
    """What orders latents, see :func:`surgery.transforms.latent_order.order_latents`.

    Args:
        layer, inputs, metric: as for :func:`fit_latent_layer`.
        effort: what is sampled.

    Returns:
        E[c cᵀ] of the latents [r, r] over all tokens, and the Gauss-Newton matrix [r, r] of the output error per
        query position in the metric, errors of different tokens taken for independent. With z ~ N(0, I) in the
        whitened output space, the gradient g = Jᵀ z has E[g gᵀ] = Jᵀ J; one z is drawn for each sampled position.
        Both float64.
    """
    root, weights = _root(layer, metric), _Weights.of(layer)
    problem, generator = _Problem(layer, inputs, root), torch.Generator().manual_seed(effort.seed)
    parts, count = Parts(len(inputs), 1), len(inputs) * min(effort.queries, inputs.shape[1])
    places = sample_blocks(parts, inputs.shape[:2], effort.queries, generator, root.device, keep=False)

    def moment(place: Place) -> Tensor:
        out = torch.randn(len(place.positions), len(root), generator=generator).to(root)
        _, cached, _, _ = problem.linearise(weights, place.sequence, place.positions).signals(out)
        return gram(cached[:, : layer.rank])

    total = places.total(moment)
    return _covariance(layer, inputs)[: layer.rank, : layer.rank], total / count


class _Weights(NamedTuple):
    """The fitted matrices, or a change of them, or a gradient. A bias is one more input channel, which is always 1."""

    down: Tensor  # [r + ρ, D (+ 1)]
    query_up: Tensor  # [H, d, r + ρ]
    value_up: Tensor  # [H, e, r]
    o: Tensor  # [D, H, e]

    @classmethod
    def of(cls, layer: LatentLayer) -> _Weights:
        return cls(affine(layer.down, layer.down_bias), layer.query_up, layer.value_up, layer.o)

    def put_into(self, layer: LatentLayer) -> LatentLayer:
        down, bias = self.down, None
        if layer.down_bias is not None:
            down, bias = down[:, :-1], down[:, -1]
        return replace(layer, down=down, down_bias=bias, query_up=self.query_up, value_up=self.value_up, o=self.o)


class _Problem:
    """A layer's inputs [N, T, D], and the layer with any weights around some query positions of one sequence."""

    def __init__(self, layer: LatentLayer, inputs: Tensor, root: Tensor):
        self._layer, self._inputs, self._root = layer, inputs, root
        self._phase = phases(layer.inv_freq, torch.arange(inputs.shape[1], device=root.device), root.dtype)

    def linearise(self, weights: _Weights, sequence: int, positions: Tensor) -> _Linearisation:
        seen = int(positions[-1]) + 1
        x = self._inputs[sequence, :seen].to(self._root)
        return _Linearisation(self._layer, weights, x, self._phase[:seen], positions, self._root)


class _Linearisation:
    """Some query positions of one sequence around the current weights; inputs x [T, D]."""

    def __init__(
        self, layer: LatentLayer, weights: _Weights, x: Tensor, phase: Tensor, positions: Tensor, root: Tensor
    ):
        source = layer.source
        self.weights, self.rank = weights, layer.rank
        self.asked = source.project_queries(x[positions]).transpose(0, 1)  # [H, M, d]
        gain = source.project_key_gain(x)  # [T, G]
        if gain is not None:
            gain = gain.T.repeat_interleave(source.heads // source.kv_heads, dim=0)[:, None]
        self.x = x if layer.down_bias is None else pad(x, (0, 1), value=1.0)
        cached = (self.x @ weights.down.mT)[None]  # [1, T, r + ρ]: one head that all queries share
        queries, latent = self.asked @ weights.query_up, cached[..., : self.rank]
        self.mixing = LinearisedMixing(source, queries, cached, latent, phase, positions, gain)
        self.mixed = self.mixing.mixed[0]  # [H, M, r]
        self.out = LinearisedOutput(self.mixed @ weights.value_up.mT, weights.o, root, gates(source, x[positions]))

    def jvp(self, vector: Tensor) -> Tensor:
        """Change of the output times F^{1/2} with a flat change of the weights, [M, D]."""
        change = unflat(vector, self.weights)
        cached = (self.x @ change.down.mT)[None]
        mixed = self.mixing.jvp(self.asked @ change.query_up, cached, cached[..., : self.rank])[0]
        return self.out.jvp(mixed @ self.weights.value_up.mT + self.mixed @ change.value_up.mT, change.o)

    def vjp(self, out: Tensor) -> Tensor:
        """The transpose of :meth:`jvp`."""
        queries, cached, heads, o = self.signals(out)
        return flat((cached.mT @ self.x, self.asked.mT @ queries, heads.mT @ self.mixed, o))

    def signals(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients at queries [H, M, c], what is cached [T, c], both before their rotation, heads [H, M, e] and o."""
        heads, o = self.out.vjp(out)
        queries, cached, latent = self.mixing.vjp((heads @ self.weights.value_up)[None])
        cached[..., : self.rank] += latent
        return queries, cached[0], heads, o


class _Preconditioner:
    """Symmetric factors on both sides of each matrix, after which the curvatures of all unknowns are alike.

    Conjugate gradients converge by the spread of curvatures. What meets the unknowns on either side is known: inputs,
    queries, attended latents and head outputs on the right of their matrices, the output metric on the left.
    """

    def __init__(
        self, layer: LatentLayer, weights: _Weights, blocks: Blocks[_Linearisation], inputs: Tensor, root: Tensor
    ):
        queries = sum(gram(layer.source.project_queries(x.to(root)).transpose(0, 1)) for x in inputs)
        mixed = blocks.total(lambda block: gram(block.mixed))
        o, metric = weights.o.double(), root.double() @ root.double()
        met = torch.einsum("xhe,xy,yhf->hef", o, metric, o)
        self.inputs, self.queries = inverse_root(_moment(layer, inputs), root), inverse_root(queries, root)
        self.values = inverse_root(met, root), inverse_root(mixed, root)
        self.outputs = inverse_root(metric, root), inverse_root(heads_moment(blocks), root)
        self.weights = weights

    def apply(self, vector: Tensor) -> Tensor:
        """Whitened unknowns to weights; its own transpose, so gradients go the other way by it too."""
        p = unflat(vector, self.weights)
        value_up = self.values[0] @ p.value_up @ self.values[1]
        return flat((p.down @ self.inputs, self.queries @ p.query_up, value_up, self._output(p.o)))

    def _output(self, o: Tensor) -> Tensor:
        return self.outputs[0] @ o.flatten(1) @ self.outputs[1]


def _root(layer: LatentLayer, metric: Tensor) -> Tensor:
    (root,) = psd_powers(metric.double(), (0.5,), floor=1e-3)
    return root.to(layer.down)


def _moment(layer: LatentLayer, inputs: Tensor) -> Tensor:
    """Second moment [D (+ 1), D (+ 1)] of what ``down`` reads, float64."""
    ones = int(layer.down_bias is not None)
    return sum(gram(pad(x.to(layer.down), (0, ones), value=1.0)) for x in inputs) / inputs.shape[:2].numel()


def _covariance(layer: LatentLayer, inputs: Tensor) -> Tensor:
    """Second moment [r + ρ, r + ρ] of what is cached, before its rotation, float64."""
    down = affine(layer.down, layer.down_bias).double()
    return down @ _moment(layer, inputs) @ down.mT


def _normalised(layer: LatentLayer, inputs: Tensor) -> LatentLayer:
    """The same layer in another basis: a latent of unit covariance, rotary pairs of unit energy."""
    covariance, rank = _covariance(layer, inputs), layer.rank
    root, inverse = psd_powers(covariance[:rank, :rank], (0.5, -0.5))
    energy = covariance.diagonal()[rank:].view(2, -1).mean(0).clamp_min(1e-18).sqrt().repeat(2)
    down, query_up = affine(layer.down, layer.down_bias).double(), layer.query_up.double()
    return _Weights(
        torch.cat([inverse @ down[:rank], down[rank:] / energy[:, None]]).to(layer.down),
        torch.cat([query_up[..., :rank] @ root, query_up[..., rank:] * energy], dim=-1).to(layer.down),
        (layer.value_up.double() @ root).to(layer.down),
        layer.o,
    ).put_into(layer)
