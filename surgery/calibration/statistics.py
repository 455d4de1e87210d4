"""Statistics of one layer: second moments of keys, values and their loss gradients, and attention over lags.

Plain moments are averages over tokens. The loss increase of an error follows from the two factors of
`surgery.calibration.kronecker`, in which tokens are weighted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.kronecker import KroneckerFactors, kronecker_factors, weighted_mean, weighted_moment
from surgery.families.anatomy import AttentionAnatomy, Projection
from surgery.families.attention import attention_weights
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.families.rope import complex_dtype, phases, to_complex
from surgery.running.moment_precision import MomentPrecision

CAUSAL_BLOCKS = 4
"""Blocks of queries per causal product, each with the keys up to its last query; more blocks save little."""
LAG_BYTES = 2**30
"""Memory for heads that lag statistics process at once on an accelerator; a CPU processes one head at a time."""


@dataclass
class LayerStatistics:
    """Uncentered second moments of one layer in float64, with keys before RoPE and before a key norm's inverse RMS.

    ``z = [k ; v]`` concatenates all KV heads: G d elements of keys, head by head, then G e elements of values.
    """

    moment: Tensor  # E[z zᵀ], [n, n] with n = G (d + e)
    gradient: Tensor | None  # E[g gᵀ], g = ∂loss/∂z: the Fisher information if labels came from the model
    query_norm: Tensor  # E|q_l| per pair, [H, d/2]
    key_norm: Tensor  # E|k_l| per pair, [G, d/2]
    tokens: int
    mean: Tensor | None = None  # E[z], [n]
    raw_gradient: Tensor | None = None  # as gradient, at keys before the key norm; None without one
    input_energy: Tensor | None = None  # E x² per channel of the attention's inputs, [D]
    # The factors of the Fisher information, ``metric ⊗ gradient_weighted_moment``; None without gradients.
    weighted_moment: Tensor | None = None  # E[w z zᵀ], [n, n], with weights w of mean one
    weighted_mean: Tensor | None = None  # E[w z], [n]
    token_weight: Tensor | None = None  # w of each token in order, float32 [N T]
    weighted_gradient: Tensor | None = None  # [n, n]
    weighted_raw_gradient: Tensor | None = None  # at keys before the key norm; None without one

    def is_finite(self) -> bool:
        """Return whether all moments are finite."""
        values = (getattr(self, each.name) for each in fields(self))
        return all(bool(value.isfinite().all()) for value in values if isinstance(value, Tensor))

    @property
    def gradient_weighted_moment(self) -> Tensor:
        """Gradient-weighted second moment of z; :attr:`moment` without gradients."""
        return self.moment if self.weighted_moment is None else self.weighted_moment

    @property
    def gradient_weighted_mean(self) -> Tensor | None:
        """Gradient-weighted mean of z; :attr:`mean` without gradients."""
        return self.mean if self.weighted_mean is None else self.weighted_mean

    @property
    def metric(self) -> Tensor | None:
        """Fisher factor of z, the pair of :attr:`gradient_weighted_moment`; :attr:`gradient` if unweighted."""
        return self.gradient if self.weighted_gradient is None else self.weighted_gradient

    @property
    def raw_metric(self) -> Tensor | None:
        """:attr:`metric` at keys before the key norm; None without one."""
        return self.raw_gradient if self.weighted_raw_gradient is None else self.weighted_raw_gradient

    def keys(self, matrix: Tensor, anatomy: AttentionAnatomy) -> Tensor:
        """Return the key block of a moment of z, as [G, d, G, d]."""
        groups, dim = anatomy.kv_heads, anatomy.head_dim
        return matrix[: groups * dim, : groups * dim].reshape(groups, dim, groups, dim)


class MomentAccumulator:
    """Accumulator of moments over batches; for devices and dtypes see :mod:`surgery.running.moment_precision`.

    With gradients, keys, values and gradients of all tokens stay on the CPU until :meth:`result`.

    Args:
        first: number of first tokens per sequence to exclude, which a cache keeps in full precision.
    """

    def __init__(
        self,
        anatomy: AttentionAnatomy | LatentAnatomy,
        *,
        gradients: bool,
        first: int = 0,
    ):
        self._first = first
        self._gradients = gradients
        self._key_norm, self._device = anatomy.k_norm, anatomy.o.device
        self._precision = MomentPrecision.of(
            self._device, sums_bytes(_width(anatomy), gradients=gradients, key_norm=anatomy.k_norm is not None)
        )
        self._held: dict[str, list[list[Tensor]]] = {name: [] for name in ("rows", "gradients", "raw_gradients")}
        self._sums: dict[str, Any] = {}
        self._total: dict[str, Any] = {}

    def add(self, projection: Projection, inputs: Tensor | None = None) -> None:
        """Add a batch, with inputs [B, T, D] or None; gradients are in ``.grad`` of its keys and values."""
        if not self._sums:  # the first batch of a part
            for parts in self._held.values():
                parts.append([])
        body = slice(self._first, None)
        q, k, v = (each.detach()[:, body] for each in (projection.q, projection.k, projection.v))
        sums, rows, precision = self._sums, _rows(k, v), self._precision
        key_gain = None if projection.key_gain is None else projection.key_gain.detach()[:, body]
        gain = 1 if key_gain is None else key_gain[..., None]
        _add(sums, "tokens", k.shape[0] * k.shape[1])
        _add(sums, "moment", precision.gram(rows))
        _add(sums, "mean", precision.total(rows))
        _add(sums, "query_norm", precision.total(to_complex(q.float()).abs(), (0, 1)))
        _add(sums, "key_norm", precision.total(to_complex(k.float()).abs() * gain, (0, 1)))
        if self._gradients:
            k_grad, v_grad = projection.k.grad[:, body], projection.v.grad[:, body]
            moments = {"rows": rows, "gradients": _rows(k_grad, v_grad)}
            _add(sums, "gradient", precision.gram(moments["gradients"]))
            if self._key_norm is not None:
                raw = raw_key_gradient(k, k_grad, key_gain, self._key_norm.weight)
                moments["raw_gradients"] = _rows(raw, v_grad)
                _add(sums, "raw_gradient", precision.gram(moments["raw_gradients"]))
            for name, batch in moments.items():
                self._held[name][-1].append(batch.cpu())
        if inputs is not None:
            x = inputs.detach()[:, body].flatten(0, 1)
            _add(sums, "input_energy", precision.total(x.square()))

    def end_part(self) -> None:
        """Add the sums of the batches since the last call to the totals."""
        for name, value in self._sums.items():
            _add(self._total, name, value)
        self._sums = {}

    def result(self) -> LayerStatistics:
        """Compute the means over all tokens."""
        self.end_part()
        total, count = self._total, self._total.pop("tokens")
        means = {"gradient": None} | {name: summed / count for name, summed in total.items()}
        factors = None
        if self._gradients:
            factors = kronecker_factors(
                self._held["rows"], self._held["gradients"], means["gradient"], device=self._device
            )
        weighted = self._weighted(factors) if factors else {}
        means = {name: mean if mean is None else mean.cpu() for name, mean in means.items()}
        return LayerStatistics(tokens=count, **means, **weighted)

    def _weighted(self, factors: KroneckerFactors) -> dict[str, Tensor]:
        raw_metric = None
        mean = weighted_mean(self._held["rows"], factors.token_weights, device=self._device)
        if self._key_norm is not None:
            raw_metric = weighted_moment(self._held["raw_gradients"], factors.gradient_weights, device=self._device)
        return {
            "weighted_moment": factors.moment,
            "weighted_mean": mean,
            "token_weight": torch.cat(factors.token_weights).float(),
            "weighted_gradient": factors.gradient,
            "weighted_raw_gradient": raw_metric,
        }


def sums_bytes(width: int, *, gradients: bool, key_norm: bool = False) -> int:
    """Return the bytes of a layer's sums in float64 for n elements per token; a key norm adds gradients."""
    matrices = 1 + gradients * (1 + key_norm)
    return 2 * 8 * matrices * width**2


def _width(anatomy: AttentionAnatomy | LatentAnatomy) -> int:
    if isinstance(anatomy, LatentAnatomy):
        return len(anatomy.down)
    return anatomy.k.shape[:2].numel() + anatomy.v.shape[:2].numel()


def _add(sums: dict[str, Any], name: str, value: Tensor | int) -> None:
    if name in sums:
        sums[name] += value
    else:
        sums[name] = value


def pair_norm(energy: Tensor) -> Tensor:
    """Compute the norm of each half-split pair, [..., d/2], from the energies of its channels, [..., d]."""
    real, imag = energy.clamp_min(0).chunk(2, dim=-1)
    return (real + imag).sqrt()


def raw_key_gradient(keys: Tensor, gradient: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    """Compute the loss gradient at keys [..., G, d] before their norm, including the path through the inverse RMS.

    With ``raw`` the keys before the norm, ``keys = weight raw`` and ``gain = (mean raw² + eps)^{-1/2}`` [..., G], whose
    gradient is ``-gain³ raw / d``: a change of a key's length alone does not affect the loss. The norm's weight is [d],
    or [G, d] over all heads; channels of weight zero count as zero.
    """
    raw = torch.where(weight == 0, 0, keys / weight)
    over = (-2, -1) if weight.ndim == 2 else -1
    length = (keys * gradient).sum(over, keepdim=True) * gain[..., None].square() / weight.numel()
    return weight * gradient - raw * length


@dataclass
class LagStatistics:
    """Effect of RoPE on each component of a key basis, over the lags that attention uses.

    With p the attention of head h, ``energy = Σ p |q'|² |k'|²`` and ``turned = Σ p |q'|² |k'|² exp(iθ(n-m))``. The
    constant that best replaces the rotation is ``turned / energy``, with squared error ``energy - |turned|²/energy``.
    """

    turned: Tensor  # complex128 [P, H]
    energy: Tensor  # float64 [P, H]

    def constant(self) -> Tensor:
        """Return the best complex constant per component and head, [P, H]."""
        return self.turned / self.energy.clamp_min(torch.finfo(torch.float64).tiny)

    def cost(self) -> Tensor:
        """Return the squared error of scores for each component without RoPE, summed over heads, [P]."""
        return (self.energy * (1 - self.constant().abs().square()).clamp_min(0)).sum(-1)


def lag_statistics(anatomy: AttentionAnatomy, basis, inputs: Tensor) -> LagStatistics:
    """Accumulate :class:`LagStatistics` over attention inputs [N, T, D].

    One sequence at a time, because attention weights are [H, T, T].
    """
    device, dtype = anatomy.k.device, anatomy.k.dtype
    key, query = (part.to(device, complex_dtype(dtype)) for part in (basis.key, basis.query))
    frequencies = anatomy.inv_freq[basis.frequency]
    group_of = torch.arange(anatomy.heads, device=device) // (anatomy.heads // anatomy.kv_heads)
    precision, query_rows = MomentPrecision.of(device), query.permute(1, 2, 0)  # [G, d/2, P]

    def of_sequence(sequence: Tensor) -> tuple[Tensor, Tensor]:
        x = sequence[None].to(device, dtype)
        projection = anatomy.project(x)
        weights = _wide(attention_weights(anatomy, projection)[0])  # [H, T, T]
        # Denormals make matrix products ten times slower on CPUs, and are negligible.
        weights.masked_fill_(weights < 1e-20, 0)
        k = to_complex(projection.k[0])
        if projection.key_gain is not None:
            weights = weights * projection.key_gain[0].square().T[group_of][:, None]
        phase = phases(frequencies, torch.arange(x.shape[1], device=device), dtype)  # [T, P]
        key_energy = torch.einsum("pgl,tgl->tp", key, k).abs().square()
        key_turned = key_energy * phase
        # One product with the attention matrix for all sums over keys: energies, cosines, sines.
        summed = torch.cat([key_energy, key_turned.real, key_turned.imag], dim=-1)
        turned, energy = [], []
        for heads in _together(anatomy.heads, len(phase) * basis.components, device):
            q = to_complex(projection.q[0].movedim(1, 0)[heads])  # [..., T, d/2], for one head or several
            query_energy = (q @ query_rows[group_of[heads]]).abs().square()  # [..., T, P]
            plain, real, imag = _causal_product(weights[heads], summed).chunk(3, dim=-1)
            energy.append(precision.kept((query_energy * plain).sum(-2)))
            turned.append(precision.kept((query_energy * phase.conj() * torch.complex(real, imag)).sum(-2)))
        return tuple(torch.cat(parts).view(anatomy.heads, -1).T.contiguous().cpu() for parts in (turned, energy))

    turned, energy = 0, 0
    for one, other in map(of_sequence, inputs):
        turned, energy = turned + one, energy + other
    return LagStatistics(turned, energy)


def _together(heads: int, numbers: int, device: torch.device) -> list[int] | list[slice]:
    """Group heads to process at once within LAG_BYTES; ``numbers`` is tokens × components."""
    if device.type == "cpu":
        return list(range(heads))
    count = max(1, LAG_BYTES // (40 * numbers))  # bytes of complex and real elements and their products
    return [slice(start, start + count) for start in range(0, heads, count)]


def _causal_product(weights: Tensor, rows: Tensor) -> Tensor:
    """Multiply causal attention weights [..., T, T] by rows [T, n], skipping most zeros."""
    tokens = weights.shape[-1]
    size = math.ceil(tokens / CAUSAL_BLOCKS)
    ends = [(start, start + size) for start in range(0, tokens, size)]
    return torch.cat([weights[..., start:end, :end] @ rows[:end] for start, end in ends], dim=-2)


def _rows(keys: Tensor, values: Tensor) -> Tensor:
    """Join keys and values, or their gradients, [B, T, G, ·] to a row ``z`` per token, [B T, n]."""
    return _wide(torch.cat([keys.flatten(2), values.flatten(2)], dim=-1).flatten(0, 1))


def _wide(rows: Tensor) -> Tensor:
    """Widen rows to at least float32: moments of 16-bit products may be singular."""
    return rows.float() if rows.itemsize < 4 else rows
