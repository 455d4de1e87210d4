"""Changes of basis that commute with RoPE, for the concatenated keys of all KV heads.

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
    """Basis of key components, with the dual basis for queries.

    ``Σ_p Re(conj(q'_p) k'_p)`` over all components equals the score of unrotated queries and keys. With each component
    rotated at its frequency it is the score of rotated ones, exactly if every component mixes a single frequency only.
    """

    key: Tensor  # [P, G, d/2], complex128
    query: Tensor  # [P, G, d/2], complex128
    frequency: Tensor  # [P], index of the frequency of a component that keeps RoPE

    @property
    def components(self) -> int:
        return self.key.shape[0]

    def key_rows(self, components: Tensor) -> Tensor:
        """Return real rows [2 n, G d] that compute components from half-split keys: real parts, then imaginary."""
        return _real_rows(self.key[components])

    def dual_rows(self, components: Tensor) -> Tensor:
        """Return :meth:`key_rows` of the query side, for gradients with respect to the components."""
        return _real_rows(self.query[components])

    def query_columns(self, components: Tensor, heads: int) -> Tensor:
        """Return real columns [H, d, 2 n] that compute the components from each head's half-split query."""
        groups = self.query.shape[1]
        rows = torch.stack([_real_rows(self.query[components, g : g + 1]) for g in range(groups)])  # [G, 2n, d]
        return rows.mT.repeat_interleave(heads // groups, dim=0)


def identity_basis(groups: int, pairs: int) -> KeyBasis:
    """Return the basis of unmixed pairs; component ``g * pairs + l`` is pair l of head g."""
    eye = torch.eye(groups * pairs, dtype=torch.complex128).view(-1, groups, pairs)
    return KeyBasis(eye, eye, torch.arange(pairs).repeat(groups))


def energy_basis(moment: Tensor, metric: Tensor | None) -> KeyBasis:
    """Compute components of descending metric-weighted energy at each frequency; component ``c * pairs + l``.

    With ``C_l = E[z z^H]`` and a metric ``M_l`` (the Fisher information ``E[g g^H]`` of the keys), the eigenvectors W
    of ``M^{1/2} C M^{1/2}`` give ``T = W^H M^{1/2}`` and ``S = T^{-H} = W^H M^{-1/2}``; the eigenvalues are the
    loss-weighted energies. Without a metric this is complex PCA. Restricted to real rotations it is TransMLA's RoRoPE
    (arXiv 2502.07864, section 4.2), which is :func:`folded_basis` with ``fold = 1``.

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
        weight = damp(frequency_blocks(metric))
        root, inverse_root = psd_powers(weight, (0.5, -0.5))
        _, vectors = eigh_descending(root @ covariance @ root)
        forward, dual = vectors.mH @ root, vectors.mH @ inverse_root
    return KeyBasis(_spread(forward), _spread(dual), torch.arange(pairs).repeat(groups))


def folded_basis(moment: Tensor, fold: int, kept_pairs: int) -> KeyBasis:
    """Compute TransMLA's FreqFold: real PCA over ``fold`` neighboring frequencies as one (arXiv 2502.07864, 4.3).

    Mixing frequencies is an approximation if ``fold > 1``. The first ``fold * kept_pairs / pairs`` components of each
    fold keep RoPE, spread over the frequencies of the fold. They come first, ordered by frequency; the others follow.

    Args:
        moment: second moment of the half-split keys, [G, d, G, d].
        fold: number of neighboring frequencies that are treated as one.
        kept_pairs: total number of components that keep RoPE, ρ/2.

    Raises:
        ValueError: ``fold`` does not divide the frequencies or the kept components evenly.
    """
    groups, dim = moment.shape[:2]
    pairs = dim // 2
    if pairs % fold or pairs % kept_pairs or (fold * kept_pairs) % pairs:
        raise ValueError(f"freqfold {fold} does not divide {pairs} rotary pairs with {kept_pairs} kept")
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
    """Convert real second moments [G, d, G, d] to Hermitian ``E[z_g conj(z_h)]`` at each frequency, [d/2, G, G]."""
    groups, dim = moment.shape[:2]
    split = moment.view(groups, 2, dim // 2, groups, 2, dim // 2).diagonal(dim1=2, dim2=5)  # [G, 2, G, 2, l]
    re_re, re_im, im_re, im_im = split[:, 0, :, 0], split[:, 0, :, 1], split[:, 1, :, 0], split[:, 1, :, 1]
    return torch.complex(re_re + im_im, im_re - re_im).permute(2, 0, 1).contiguous()


def _spread(per_frequency: Tensor) -> Tensor:
    """Expand per-frequency coefficients [l, c, G] to components [c * l, G, l]; component ``c * pairs + l``."""
    pairs, count, groups = per_frequency.shape
    spread = per_frequency.new_zeros(count, pairs, groups, pairs)
    frequency = torch.arange(pairs)
    spread[:, frequency, :, frequency] = per_frequency
    return spread.flatten(0, 1)


def _real_rows(coefficients: Tensor) -> Tensor:
    """Convert complex functionals [n, G, l] of half-split heads to real rows [2 n, G d]: real parts, then imaginary."""
    real, imag = coefficients.real, coefficients.imag
    re_rows = torch.cat([real, -imag], dim=-1)  # of (re x, im x) per head
    im_rows = torch.cat([imag, real], dim=-1)
    return torch.cat([re_rows, im_rows]).flatten(1)
