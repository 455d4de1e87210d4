"""Named methods of ``--to lowrank``: layout of the latents over heads, and solvers for their factors.

========== ========================== ======================================== ===================================
method     latents                    factors                                  source
========== ========================== ======================================== ===================================
fisher     one for keys and values    least error in the metric of the loss    ours
separate   one for keys, one for      as fisher                                ours
           values
svd-llm    as separate                least error of keys and of values        SVD-LLM, arXiv:2403.07378
palu       two for every four heads,  svd-llm's                                Palu, arXiv:2407.21118 (G-LRD)
           ranks by the Fisher
           information of weights
========== ========================== ======================================== ===================================

Every method takes the second moment of the elements to rebuild, ``C = E[z zᵀ]`` with ``z = W x``. The second moment X
of the inputs is never needed, since ``C = W X Wᵀ``. Whitening gives ``W X^{1/2} = U Σ Vᵀ`` and hence
``up down = U_r U_rᵀ W``, where U are the eigenvectors of C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry
from surgery.families.anatomy import AttentionAnatomy
from surgery.transforms.algebra import eigh_descending, reduced_rank_projection
from surgery.transforms.allocation import proportional
from surgery.transforms.low_rank_layer import Block

PALU_HEADS = 4
Layout = Literal["joint", "separate", "groups"]


@dataclass(frozen=True)
class BlockMoments:
    """Moments of the n elements z that a block of latents replaces; float64."""

    moment: Tensor  # E[z zᵀ], [n, n]
    metric: Tensor  # E[g gᵀ] of the loss gradients at z, damped, [n, n]

    def of(self, index: Tensor) -> BlockMoments:
        """Select the moments of the elements at ``index``."""
        return BlockMoments(*(matrix[index[:, None], index] for matrix in (self.moment, self.metric)))


@dataclass(frozen=True)
class Factors:
    """Factors of ``z ≈ up down z``, and the energies of all possible latents in the method's metric, descending."""

    down: Tensor  # [r, n]
    up: Tensor  # [n, r]
    energy: Tensor  # [n]


@dataclass(frozen=True)
class Method:
    """Definition of a named method: factors of a block from its moments and its rank.

    Attributes:
        layout: ``joint``, ``separate``, or ``groups`` of heads with keys and values apart.
        weighted: whether it uses the metric of the loss, which makes energies of different layers comparable.
    """

    factors: Callable[[BlockMoments, int], Factors]
    layout: Layout = "separate"
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout {self.layout!r} is unknown: choose from {get_args(Layout)}")


def check_factors(method: str, factors: Factors, rank: int, elements: int) -> None:
    """Raise SurgeryError unless a method returned float64 `Factors` of this rank and number of elements."""
    shapes = {"down": (rank, elements), "up": (elements, rank), "energy": (elements,)}
    for name, shape in shapes.items():
        part = getattr(factors, name, None)
        if not isinstance(part, Tensor) or part.dtype != torch.float64 or tuple(part.shape) != shape:
            actual = f"{tuple(part.shape)}, {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
            raise SurgeryError(f"method {method}: {name} must be float64 of shape {shape}, not {actual}")


def loss_weighted(block: BlockMoments, rank: int) -> Factors:
    """Solve for the least error in the metric of the loss (see :func:`reduced_rank_projection`).

    The scale of the latents is free. It is chosen to give them the energy of the elements they replace, so that both
    factors are about as large as the source's weights.
    """
    down, up, energy = reduced_rank_projection(block.moment, block.metric, rank)
    tiny = torch.finfo(energy.dtype).tiny
    scale = (block.moment.trace().clamp_min(tiny) / energy[:rank].sum().clamp_min(tiny)).sqrt()
    return Factors(down * scale, up / scale, energy)


def whitened(block: BlockMoments, rank: int) -> Factors:
    """Solve for the least unweighted error of z: SVD-LLM's truncation-aware whitening."""
    energy, basis = eigh_descending(block.moment)
    return Factors(basis[:, :rank].mT, basis[:, :rank], energy.clamp_min(0))


METHODS: Registry[Method] = Registry(
    "low_rank_methods",
    {
        "fisher": Method(loss_weighted, layout="joint", weighted=True),
        "separate": Method(loss_weighted, weighted=True),
        "svd-llm": Method(whitened),
        "palu": Method(whitened, layout="groups"),
    },
    Method,
)


def blocks_for(method: str, anatomy: AttentionAnatomy, rank: int, *, key_rank: int | None = None) -> tuple[Block, ...]:
    """Split a layer's budget into blocks of latents, ``rank`` in total.

    ``key_rank`` is for layouts that separate keys and values; by default half, or more if the values cannot use theirs.
    Raises SurgeryError: the budget does not suit the method.
    """
    layout = METHODS[method].layout
    heads = tuple(range(anatomy.kv_heads))
    keys, values = anatomy.kv_heads * anatomy.head_dim, anatomy.kv_heads * anatomy.value_dim
    if not 1 <= rank <= keys + values:
        raise SurgeryError(f"rank {rank} is not possible: choose 1 to {keys + values} elements per token and layer")
    if layout == "joint":
        return (Block(rank, heads, heads),)
    groups = [heads]
    if layout == "groups":
        groups = [heads[start : start + PALU_HEADS] for start in range(0, len(heads), PALU_HEADS)]
    if key_rank is None:
        key_rank = max(rank // 2, rank - values)
    value_rank, least = rank - key_rank, len(groups)
    if not (least <= key_rank <= keys and least <= value_rank <= values):
        raise SurgeryError(
            f"ranks {key_rank} for keys and {value_rank} for values are not possible: "
            f"choose {least} to {keys} and {least} to {values}"
        )
    sizes = [len(group) for group in groups]
    key_ranks = proportional(sizes, key_rank, maximum=[n * anatomy.head_dim for n in sizes])
    value_ranks = proportional(sizes, value_rank, maximum=[n * anatomy.value_dim for n in sizes])
    return (
        *(Block(r, group, ()) for r, group in zip(key_ranks, groups, strict=True)),
        *(Block(r, (), group) for r, group in zip(value_ranks, groups, strict=True)),
    )


def fisher_information(anatomy: AttentionAnatomy, statistics: LayerStatistics) -> tuple[float, float]:
    """Estimate Palu's Fisher information of the weights of a layer's key projection and of its value projection.

    Palu's public code takes the root mean square of each weight's gradient and averages over the weights. The gradient
    of a weight is ``Σ g_i x_j`` over tokens. If tokens are independent, and gradients independent of inputs (as in
    K-FAC, arXiv:1503.05671), its mean square is ``E g_i² E x_j²`` per token.
    """
    keys = anatomy.kv_heads * anatomy.head_dim
    energy = statistics.gradient.diagonal().clone()
    if statistics.raw_gradient is not None:
        energy = statistics.raw_gradient.diagonal()
    elif anatomy.k_norm is not None:
        energy[:keys] *= anatomy.k_norm.weight.square().expand(anatomy.kv_heads, -1).flatten()
    inputs = statistics.input_energy.sqrt().mean()
    return tuple(float(part.clamp_min(0).sqrt().mean() * inputs) for part in (energy[:keys], energy[keys:]))


def palu_ranks(
    information: Sequence[tuple[float, float]], anatomy: AttentionAnatomy, total: int
) -> list[tuple[int, int]]:
    """Allocate ranks for keys and values per layer in proportion to Fisher information (Palu's "fisher_uniform").

    ``total`` limits the elements per token of all layers, which have the shape of ``anatomy``. Raises SurgeryError: it
    is less than the minima together.
    """
    groups = -(-anatomy.kv_heads // PALU_HEADS)
    widths = (anatomy.kv_heads * anatomy.head_dim, anatomy.kv_heads * anatomy.value_dim)
    weights = [part for pair in information for part in pair]
    ranks = proportional(weights, total, groups, minimum=groups, maximum=list(widths) * len(information))
    return list(zip(ranks[::2], ranks[1::2], strict=True))
