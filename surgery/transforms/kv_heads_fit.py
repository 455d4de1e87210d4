"""Fits a layer of plain grouped-query attention to wanted outputs: Gauss-Newton steps over all of its projections."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from surgery.families.anatomy import AttentionAnatomy
from surgery.families.rope import phases
from surgery.running.processes import ALONE, Processes
from surgery.transforms.algebra import psd_powers
from surgery.transforms.attention_fit import (
    LinearisedAttention,
    LinearisedMixing,
    Wanted,
    fit_attention,
    flat,
    gram,
    heads_moment,
    inverse_root,
    unflat,
)
from surgery.transforms.effort import USUAL, Effort
from surgery.transforms.fit_blocks import Blocks
from surgery.transforms.head_grouping import affine


@torch.no_grad()
def fit_merged_layer(
    layer: AttentionAnatomy,
    inputs: Tensor,
    targets: Tensor,
    metric: Tensor,
    effort: Effort = USUAL,
    *,
    damping: float = 1e-3,
    processes: Processes = ALONE,
) -> tuple[AttentionAnatomy, float, float]:
    """Fits q, k, v and o together (biases too, the output's left alone) to wanted outputs.

    Minimises ``Σ_m ‖F^{1/2} (out_m - target_m)‖²`` as :func:`surgery.transforms.attention_fit.fit_attention` does.

    Args:
        layer: where to start, without q/k-norms, on the device and in the dtype to compute in (float32 or better).
        inputs: [N, T, D] what enters the attention.
        targets: [N, T, D] wanted outputs, the output bias left out.
        metric: F [D, D], second moment of the loss gradient at the output.
        damping: relative to the curvature along the gradient.
        processes: that share the sequences, see :func:`surgery.transforms.attention_fit.fit_attention`.

    Returns:
        The fitted layer, and the error before and after the last step on its sample, relative to the targets' energy.
    """
    (root,) = psd_powers(metric.double(), (0.5,), floor=1e-3)
    root, tokens = root.to(layer.k), inputs.shape[1]
    phase = phases(layer.inv_freq, torch.arange(tokens, device=layer.k.device), layer.k.dtype)
    moment = sum(gram(pad(x.to(layer.k), (0, 1), value=1.0)) for x in inputs) / inputs.shape[:2].numel()
    start = _Weights.of(layer)

    def linearise(weights: _Weights, sequence: int, positions: Tensor) -> _Linearisation:
        seen = int(positions[-1]) + 1
        x = pad(inputs[sequence, :seen].to(layer.k), (0, 1), value=1.0)
        return _Linearisation(layer, weights, x, phase[:seen], positions, root)

    fitted, before, after = fit_attention(
        start,
        linearise,
        lambda blocks: _Preconditioner(layer, start, blocks, moment, root).apply,
        Wanted(targets, root),
        effort,
        damping,
        processes,
    )
    return fitted.put_into(layer), before, after


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


class _Linearisation:
    """Some query positions of one sequence around the current weights; x [T, D + 1], the last number always 1."""

    def __init__(
        self, layer: AttentionAnatomy, weights: _Weights, x: Tensor, phase: Tensor, positions: Tensor, root: Tensor
    ):
        self.weights, self.x, self.asking = weights, x, x[positions]
        q, k, v = self._projected(weights)
        mixing = LinearisedMixing(layer, q, k, v, phase, positions)
        self.attention = LinearisedAttention(mixing, weights.o, root)
        self.out = self.attention.out

    def jvp(self, vector: Tensor) -> Tensor:
        """Change of the output times F^{1/2} with a flat change of the weights, [M, D]."""
        change = unflat(vector, self.weights)
        return self.attention.jvp(*self._projected(change), change.o)

    def vjp(self, out: Tensor) -> Tensor:
        """The transpose of :meth:`jvp`."""
        *parts, o = self.attention.vjp(out)
        met = (self.asking, self.x, self.x)
        gradients = (
            part.mT @ x[:, : weight.shape[-1]] for part, x, weight in zip(parts, met, self.weights, strict=False)
        )
        return flat((*gradients, o))

    def _projected(self, weights: _Weights) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [H, M, d] of the positions, keys and values [G, T, ·], by weights with biases or without."""
        q, k, v, _ = weights
        met = (self.asking, self.x, self.x)
        return tuple(x[:, : weight.shape[-1]] @ weight.mT for x, weight in zip(met, (q, k, v), strict=True))


class _Preconditioner:
    """Symmetric factors on both sides of each kind of unknowns, after which their curvatures are alike.

    On the right stand the inputs that meet a matrix; on the left what its result meets: the energies of keys for
    queries and of queries for keys, one number a pair as rotation mixes no others, and the output metric for values.
    """

    def __init__(
        self, layer: AttentionAnatomy, weights: _Weights, blocks: Blocks[_Linearisation], moment: Tensor, root: Tensor
    ):
        metric, o = (root @ root).double(), weights.o.double()
        groups, repeat = layer.kv_heads, layer.heads // layer.kv_heads

        def pair_energy(weight: Tensor) -> Tensor:  # [h, d, 1]
            rows, size = weight.double(), weight.shape[-1]
            re, im = ((rows @ moment[:size, :size]) * rows).sum(-1, keepdim=True).chunk(2, dim=1)
            return (re + im).clamp_min(1e-18).repeat(1, 2, 1)

        sizes = [weight.shape[-1] for weight in weights[:3]]
        factors = {size: inverse_root(moment[:size, :size], root) for size in set(sizes)}
        self.inputs = [factors[size] for size in sizes]
        self.query = pair_energy(weights.k).rsqrt().repeat_interleave(repeat, dim=0).to(root)
        self.key = pair_energy(weights.q).unflatten(0, (groups, repeat)).sum(1).rsqrt().to(root)
        met = torch.einsum("xhe,xy,yhf->hef", o, metric, o).unflatten(0, (groups, repeat)).sum(1)
        self.value = inverse_root(met, root)
        self.heads, self.outputs = inverse_root(heads_moment(blocks), root), inverse_root(metric, root)
        self.weights = weights

    def apply(self, vector: Tensor) -> Tensor:
        """Whitened unknowns to weights; its own transpose, so gradients go the other way by it too."""
        p, (q, k, v) = unflat(vector, self.weights), self.inputs
        o = self.outputs @ p.o.flatten(1) @ self.heads
        return flat((self.query * p.q @ q, self.key * p.k @ k, self.value @ p.v @ v, o))
