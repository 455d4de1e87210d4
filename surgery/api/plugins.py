"""Registration of plugins from Python. Packages register by entry points: CONTRIBUTING.md, "Plug in"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.evaluation.kinds import Build
    from surgery.families import Family
    from surgery.heads.scorer import Scorer
    from surgery.structures.registry import Target


def register_structure(target: Target) -> None:
    """Register a conversion target for ``--to``: its settings and its :class:`surgery.structures.base.Structure`."""
    from surgery.structures.registry import TARGETS

    TARGETS.register(target.name, target)


def register_family(family: Family) -> None:
    """Register a model family, by its ``model_type``."""
    from surgery.families import FAMILIES

    FAMILIES.register(family.model_type, family)


def register_scorer(name: str, scorer: Scorer) -> None:
    """Register a method of scoring heads: a function of a :class:`surgery.heads.scorer.ScoringSession` to scores."""
    from surgery.heads.methods import SCORERS

    SCORERS.register(name, scorer)


def register_task(name: str, build: Build) -> None:
    """Register an evaluation task: a function of :class:`surgery.evaluation.task_data.TaskData` to a task
    (`surgery.eval.session`)."""
    from surgery.evaluation.kinds import TASKS

    TASKS.register(name, build)


def register_method(structure: str, name: str, method: Any) -> None:
    """Register a method of a structure with pluggable methods, such as ``lowrank`` and ``gqa``.

    Args:
        method: a :class:`surgery.transforms.low_rank_methods.Method` or :class:`surgery.transforms.kv_heads.Method`.

    Raises:
        SurgeryError: the structure has no pluggable methods, or ``method`` is not a Method.
    """
    from surgery.common.plugins import load
    from surgery.structures.registry import TARGETS

    registries = {target.name: target.methods for target in TARGETS.working().values() if target.methods}
    if structure not in registries:
        raise SurgeryError(f"cannot add methods to {structure!r}: choose one of {', '.join(registries)}")
    load(registries[structure]).register(name, method)
