"""Sorts the latents of an MLA layer by what they are worth, so that its first ones are a good smaller layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.transforms.algebra import eigh_descending, psd_powers
from surgery.transforms.latent_layer import LatentLayer

EMPTY = 1e-9  # a latent with less than this share of the largest energy is kept at that scale, so that bases invert


def order_latents(layer: LatentLayer, moment: Tensor, metric: Tensor) -> tuple[LatentLayer, Tensor]:
    """The same layer with the latents [r] in a basis sorted by worth; rotary dimensions stay as they are.

    What a change of the cached latent c costs is, to second order, ``E (c - ĉ)ᵀ G (c - ĉ)`` with G the Gauss-Newton
    matrix of the layer's output error. Of all projections to r' latents the leading eigenvectors of
    ``S^{1/2} G S^{1/2} = W Λ Wᵀ`` with S = E[c cᵀ] cost least, for every r' at once (Eckart and Young 1936). In the new
    basis latents are uncorrelated and have variances in proportion to Λ, the mean of all being one.

    Args:
        layer: any; computed with in float64, given back in its own dtype.
        moment: S [r, r], biases included.
        metric: G [r, r], positive semidefinite.

    Returns:
        The layer, which computes what it did, and Λ [r], float64, descending: what the layer costs without its last
        latents is the sum of theirs.

    Raises:
        SurgeryError: a matrix of the wrong size.
    """
    rank = layer.rank
    for name, matrix in (("moment", moment), ("metric", metric)):
        if matrix.shape != (rank, rank):
            raise SurgeryError(f"ordering latents: the {name} is {tuple(matrix.shape)}, this layer has {rank} latents")
    moment, metric = (matrix.to(layer.down.device, torch.float64) for matrix in (moment, metric))
    root, inverse_root = psd_powers(moment, (0.5, -0.5))
    energy, basis = eigh_descending(root @ metric @ root)
    energy = energy.clamp_min(0)
    scale = (energy + EMPTY * energy.amax()).clamp_min(torch.finfo(energy.dtype).tiny).sqrt()
    scale = scale / scale.square().mean().sqrt()
    change, back = scale[:, None] * basis.mT @ inverse_root, root @ basis / scale

    def of_rows(part: Tensor) -> Tensor:
        return torch.cat([(change @ part[:rank].double()).to(part), part[rank:]])

    def of_columns(part: Tensor) -> Tensor:
        return torch.cat([(part[..., :rank].double() @ back).to(part), part[..., rank:]], dim=-1)

    return (
        replace(
            layer,
            down=of_rows(layer.down),
            down_bias=None if layer.down_bias is None else of_rows(layer.down_bias),
            query_up=of_columns(layer.query_up),
            value_up=of_columns(layer.value_up),
        ),
        energy,
    )
