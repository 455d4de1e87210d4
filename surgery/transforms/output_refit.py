"""Least-squares refit of the output projection, which makes up for a part of what a conversion changes in attention.

Let y [D] be the output of the source's attention for a token, without a bias, and â [H e] the head outputs of the
converted attention (after the gate, if any) on the same layer input. The converted layer gets

    W = argmin_W E‖y - W â‖² + λ ‖W - Ŵ‖² = (E[y âᵀ] + λ Ŵ) (E[â âᵀ] + λ I)^-1

with Ŵ its output projection before: ridge regression towards no change (Hoerl and Kennard 1970,
doi:10.1080/00401706.1970.10488634). Shapes and operations stay the same. λ is the mean square of â times the ratio of
unknowns to equations, H e / tokens: with few tokens W stays close to Ŵ.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def refit_output(o: Tensor, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Refit an output projection [D, H, e]; return it in its dtype, on its device.

    Args:
        batches: the source's outputs y [..., D], and converted head outputs [..., H, e] of the same tokens.
    """
    old = o.flatten(1).cpu().double()
    cross, moment, tokens = torch.zeros_like(old), torch.zeros(old.shape[1], old.shape[1], dtype=torch.float64), 0
    for outputs, heads in batches:
        y, a = outputs.flatten(0, -2), heads.flatten(-2).flatten(0, -2)
        cross += (y.mT @ a).cpu()
        moment += (a.mT @ a).cpu()
        tokens += len(a)
    if not moment.any():  # a layer that passes nothing on
        return o
    ridge = moment.diagonal().mean() * len(moment) / tokens
    moment.diagonal().add_(ridge)
    new = torch.linalg.solve(moment, cross.add_(ridge * old), left=False)
    return new.to(o).unflatten(1, o.shape[1:])
