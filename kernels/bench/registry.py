"""Registry of cases: operations × models × variants × contexts × batches × dtypes, the telling ones first."""

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
    """Return the cases of every file in `operations/` by their operation."""
    operations = {}
    for file in pkgutil.iter_modules(files.__path__):
        for each in vars(import_module(f"{files.__name__}.{file.name}")).values():
            # Python 3.10 takes list[int] for an instance of type.
            if issubclass(type(each), type) and issubclass(each, Case) and not isabstract(each):
                operations[each.operation] = each
    return operations


OPERATIONS = _operations()
"""Operations by name, with the kind of their cases."""


def cases(
    operations: Iterable[str],
    models: Iterable[str],
    contexts: Iterable[int],
    batches: Iterable[int],
    dtypes: Iterable[torch.dtype],
) -> list[Case]:
    """All cases, operations taking turns: whenever a run is stopped, each has some results.

    Of every operation the largest decoding steps come first, where the targets are and launches do not matter.

    Raises:
        ValueError: an operation or a model that there is not.
    """
    operations, models = list(operations), list(models)
    for what, names, choices in (("operation", operations, OPERATIONS), ("shape", models, MODELS)):
        for name in names:
            if name not in choices:
                raise ValueError(f"unknown {what} {name!r}: choose {', '.join(choices)}")
    places = [
        {"model": model, "batch": batch, "context": context, "dtype": dtype, "shape": MODELS[model]}
        for dtype in dtypes
        for context, batch in sorted(
            ((context, batch) for context in contexts for batch in batches), key=lambda at: -at[0] * at[1]
        )
        for model in models
    ]
    each = [[case for place in places for case in OPERATIONS[name].at(place)] for name in operations]
    return [case for turn in zip_longest(*each) for case in turn if case is not None]
