"""Results of several operators over disjoint tokens of the same rows → the result over all of them, exactly.

For tokens kept in several forms: quantized ones and the exact ones behind them, for instance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges (out, lse) pairs as operators return them, by the formulas of `split_kv`.

    Plain operations of PyTorch: they have gradients, and under `torch.compile` become one kernel.

    Args:
        outs: each [B, T, H, v], or one tensor of them stacked along dimension 0.
        lses: each [B, T, H], or one tensor likewise; natural logarithms, -∞ where a part had nothing to see.

    Returns:
        out [B, T, H, v] in the dtype of the first part and lse [B, T, H]; 0 and -∞ where no part had anything to see.

    Raises:
        ValueError: no parts, another number of logs than of outs, or shapes that differ.
    """
    if not len(outs) or len(outs) != len(lses):
        raise ValueError(
            f"merge_parts: {len(outs)} outs and {len(lses)} logs: as many of one as of the other are needed"
        )
    if any(out.shape != outs[0].shape or log.shape != outs[0].shape[:-1] for out, log in zip(outs, lses, strict=True)):
        shapes = ", ".join(f"{tuple(out.shape)} {tuple(log.shape)}" for out, log in zip(outs, lses, strict=True))
        raise ValueError(f"merge_parts: parts of other rows: {shapes}")
    logs = torch.stack(tuple(lses))
    # Detached: it cancels. -∞ - -∞ would be NaN where no part had anything to see.
    max_logit = logs.detach().amax(dim=0)
    weights = (logs - max_logit.masked_fill(max_logit == -torch.inf, 0.0)).exp()
    sum_exp = weights.sum(dim=0)
    empty = ~(sum_exp > 0)
    safe = sum_exp.masked_fill(empty, 1.0)
    acc = sum(weight.unsqueeze(-1) * out for weight, out in zip(weights, outs, strict=True)) / safe.unsqueeze(-1)
    return acc.to(outs[0].dtype), (safe.log() + max_logit).masked_fill(empty, -torch.inf)
