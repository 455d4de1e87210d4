"""Registry of cases: operations × models × variants × contexts × batches, largest first."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import torch

from surgery.kernels.bench.case import MODELS, Case
from surgery.kernels.bench.operations.lowrank_decode import LowRankDecode
from surgery.kernels.bench.operations.mla_decode import MLADecode
from surgery.kernels.bench.operations.packed_decode import MLADecodePacked
from surgery.kernels.bench.operations.sdpa import SDPA

OPERATIONS: dict[str, type[Case]] = {kind.operation: kind for kind in (LowRankDecode, MLADecode, MLADecodePacked, SDPA)}
"""Case class of each operation, by name."""


def cases(
    operations: Iterable[str],
    models: Iterable[str],
    contexts: Iterable[int],
    batches: Iterable[int],
    dtype: torch.dtype,
) -> list[Case]:
    """Return all cases, alternating between operations, so that an interrupted run has results for each.

    The largest cases of each operation come first, since launch overhead matters least there.
    """
    models = list(models)
    common_fields = [
        {"model": model, "batch": batch, "context": context, "dtype": dtype, "shape": MODELS[model]}
        for context, batch in sorted(
            ((context, batch) for context in contexts for batch in batches), key=lambda at: -at[0] * at[1]
        )
        for model in models
    ]
    each = [[case for fields in common_fields for case in OPERATIONS[name].at(fields)] for name in operations]
    return [case for turn in zip_longest(*each) for case in turn if case is not None]
