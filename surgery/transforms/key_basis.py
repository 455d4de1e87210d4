"""Changes of basis of the wide key space (all KV heads side by side), in the complex commutant of RoPE.

RoPE multiplies the pair of frequency ``l`` in every head by the same phase, so any complex-linear map over the heads of
one frequency commutes with it. With ``k' = T_l k`` and ``q' = T_l^{-H} q`` all scores stay unchanged.

A component is one complex number per token, ``k'_p = Σ_{g,l} key[p,g,l] k_{g,l}``; P = G d/2 of them span the space.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.transforms.algebra import damp, eigh_descending, psd_powers


@dataclass(frozen=True)
class KeyBasis:
    """Components of the keys and the queries that meet them.

    ``Σ_p Re(conj(q'_p) k'_p)`` over all components equals the score of unrotated queries and keys, and with each
    component rotated at its frequency the score of rotated ones (exactly, where a component draws on one frequency).
    """

    key: Tensor  # [P, G, d/2], complex128
    query: Tensor  # [P, G, d/2], complex128
    frequency: Tensor  # [P], index of the frequency at which a component turns if it keeps its rotation

    @property
    def components(self) -> int:
        return self.key.shape[0]

    def key_rows(self, components: Tensor) -> Tensor:
        """Real rows [2 n, G d] that compute the given components from half-split keys: real parts, then imaginary."""
        return _real_rows(self.key[components])

    def dual_rows(self, components: Tensor) -> Tensor:
        """Return :meth:`key_rows` for the query side, in which gradients with respect to the components live."""
        return _real_rows(self.query[components])

    def query_columns(self, components: Tensor, heads: int) -> Tensor:
        """Real columns [H, d, 2 n] that turn each head's half-split query into the given components."""
        groups = self.query.shape[1]
        rows = torch.stack([_real_rows(self.query[components, g : g + 1]) for g in range(groups)])  # [G, 2n, d]
        return rows.mT.repeat_interleave(heads // groups, dim=0)


def identity_basis(groups: int, pairs: int) -> KeyBasis:
    """Every head's own pairs, unmixed; component ``g * pairs + l``."""
    eye = torch.eye(groups * pairs, dtype=torch.complex128).view(-1, groups, pairs)
    return KeyBasis(eye, eye, torch.arange(pairs).repeat(groups))


def energy_basis(moment: Tensor, metric: Tensor | None) -> KeyBasis:
    """Components of decreasing metric-weighted energy at each frequency; component ``c * pairs + l``.

    With ``C_l = E[z z^H]`` and a metric ``M_l`` (the Fisher information ``E[g g^H]`` of the keys), the eigenvectors W
    of ``M^{1/2} C M^{1/2}`` give ``T = W^H M^{1/2}`` and ``S = T^{-H} = W^H M^{-1/2}``; the eigenvalues are the
    loss-weighted energies. Without a metric this is complex PCA, whose restriction to real rotations is TransMLA's
    RoRoPE (arXiv 2502.07864, section 4.2): :func:`folded_basis` of one frequency.

    Args:
        moment: second moment of the half-split keys, [G, d, G, d], float64.
        metric: second moment of the loss gradients at them, same shape, or None for the identity.
    """
    covariance = frequency_blocks(moment)  # [l, G, G]
    pairs, groups, _ = covariance.shape
    if metric is None:
        _, vectors = eigh_descending(covariance)
        forward = dual = vectors.mH
    else:
        weight = damp(frequency_blocks(metric), 1e-6)
        root, inverse_root = psd_powers(weight, (0.5, -0.5))
        _, vectors = eigh_descending(root @ covariance @ root)
        forward, dual = vectors.mH @ root, vectors.mH @ inverse_root
    return KeyBasis(_spread(forward), _spread(dual), torch.arange(pairs).repeat(groups))


def folded_basis(moment: Tensor, fold: int, kept_pairs: int) -> KeyBasis:
    """TransMLA's FreqFold: real PCA over ``fold`` neighboring frequencies taken for one (arXiv 2502.07864, 4.3).

    Mixing frequencies is an approximation wherever fold > 1. The first ``fold * kept_pairs / pairs`` components of each
    fold keep RoPE, spread over the fold's own frequencies; they come first, in the order of their frequencies, and
    the others follow.

    Args:
        moment: second moment of the half-split keys, [G, d, G, d].
        fold: how many neighboring frequencies are treated as one.
        kept_pairs: how many components will keep their rotation in all, ρ/2.

    Raises:
        ValueError: the fold does not divide the frequencies, or the kept components, evenly.
    """
    groups, dim = moment.shape[:2]
    pairs = dim // 2
    if pairs % fold or pairs % kept_pairs or (fold * kept_pairs) % pairs:
        raise ValueError(f"a fold of {fold} does not divide {pairs} pairs of which {kept_pairs} stay rotated")
    split = moment.view(groups, 2, pairs, groups, 2, pairs)
    energy = split[:, 0, :, :, 0] + split[:, 1, :, :, 1]  # E[re re' + im im'], [G, pairs, G, pairs]
    per_fold, stride = fold * kept_pairs // pairs, pairs // kept_pairs
    kept_rows, dropped, kept_frequency, dropped_frequency = [], [], [], []
    for start in range(0, pairs, fold):
        inside = slice(start, start + fold)
        block = energy[:, inside, :, inside].reshape(groups * fold, groups * fold)
        _, vectors = eigh_descending(damp(block, 0.01))
        rows = moment.new_zeros(groups * fold, groups, pairs)
        rows[:, :, inside] = vectors.mT.reshape(-1, groups, fold)
        kept_rows.append(rows[:per_fold])
        dropped.append(rows[per_fold:])
        kept_frequency += [start + c * stride for c in range(per_fold)]
        dropped_frequency += [start + c % fold for c in range(per_fold, groups * fold)]
    rows = torch.cat(kept_rows + dropped).to(torch.complex128)
    return KeyBasis(rows, rows, torch.tensor(kept_frequency + dropped_frequency))


def frequency_blocks(moment: Tensor) -> Tensor:
    """Hermitian second moments ``E[z_g conj(z_h)]`` at each frequency, [d/2, G, G], from real ones [G, d, G, d]."""
    groups, dim = moment.shape[:2]
    split = moment.view(groups, 2, dim // 2, groups, 2, dim // 2).diagonal(dim1=2, dim2=5)  # [G, 2, G, 2, l]
    re_re, re_im, im_re, im_im = split[:, 0, :, 0], split[:, 0, :, 1], split[:, 1, :, 0], split[:, 1, :, 1]
    return torch.complex(re_re + im_im, im_re - re_im).permute(2, 0, 1).contiguous()


def _spread(per_frequency: Tensor) -> Tensor:
    """Coefficients [l, c, G] of one frequency each as components [c * l, G, l], component ``c * pairs + l``."""
    pairs, count, groups = per_frequency.shape
    spread = per_frequency.new_zeros(count, pairs, groups, pairs)
    frequency = torch.arange(pairs)
    spread[:, frequency, :, frequency] = per_frequency
    return spread.flatten(0, 1)


def _real_rows(coefficients: Tensor) -> Tensor:
    """Complex functionals [n, G, l] of half-split heads as real rows [2 n, G d]: all real parts, then all imaginary."""
    real, imag = coefficients.real, coefficients.imag
    re_rows = torch.cat([real, -imag], dim=-1)  # of (re x, im x) per head
    im_rows = torch.cat([imag, real], dim=-1)
    return torch.cat([re_rows, im_rows]).flatten(1)
