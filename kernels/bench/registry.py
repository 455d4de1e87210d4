"""Registry of cases: operations × models × variants × contexts × batches × dtypes, largest first."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from inspect import isabstract
from itertools import zip_longest

import torch

from surgery.kernels.bench import operations as files
from surgery.kernels.bench.case import MODELS, Case


def _operations() -> dict[str, type[Case]]:
    operations = {}
    for file in pkgutil.iter_modules(files.__path__):
        for each in vars(import_module(f"{files.__name__}.{file.name}")).values():
            # In Python 3.10 `isinstance(list[int], type)` is True.
            if issubclass(type(each), type) and issubclass(each, Case) and not isabstract(each):
                operations[each.operation] = each
    return operations


OPERATIONS = _operations()
"""Case class of each operation, by name."""


def cases(
    operations: Iterable[str],
    models: Iterable[str],
    contexts: Iterable[int],
    batches: Iterable[int],
    dtypes: Iterable[torch.dtype],
) -> list[Case]:
    """Return all cases, alternating between operations, so that an interrupted run has results for each.

    The largest cases of each operation come first, since launch overhead matters least there. Raises ValueError:
    unknown operation or model.
    """
    operations, models = list(operations), list(models)
    for what, names, choices in (("operation", operations, OPERATIONS), ("shape", models, MODELS)):
        for name in names:
            if name not in choices:
                raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(choices)}")
    common_fields = [
        {"model": model, "batch": batch, "context": context, "dtype": dtype, "shape": MODELS[model]}
        for dtype in dtypes
        for context, batch in sorted(
            ((context, batch) for context in contexts for batch in batches), key=lambda at: -at[0] * at[1]
        )
        for model in models
    ]
    each = [[case for fields in common_fields for case in OPERATIONS[name].at(fields)] for name in operations]
    return [case for turn in zip_longest(*each) for case in turn if case is not None]
