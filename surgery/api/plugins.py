"""Adding to what the commands know, from a program. Packages do the same by entry points: CONTRIBUTING.md, "Plug
in"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.evaluation.kinds import Build
    from surgery.families import Family
    from surgery.heads.scorer import Scorer
    from surgery.structures.registry import Target


def register_structure(target: Target) -> None:
    """A structure that ``--to`` can name: its settings, and where its :class:`surgery.structures.base.Structure` is."""
    from surgery.structures.registry import TARGETS

    TARGETS.register(target.name, target)


def register_family(family: Family) -> None:
    """A family of models that can be converted."""
    from surgery.families import FAMILIES

    FAMILIES.register(family.model_type, family)


def register_scorer(name: str, scorer: Scorer) -> None:
    """A way to score heads: from a :class:`surgery.heads.scorer.ScoringSession` to scores."""
    from surgery.heads.methods import SCORERS

    SCORERS.register(name, scorer)


def register_task(name: str, build: Build) -> None:
    """A task of evaluations: from :class:`surgery.evaluation.task_data.TaskData` to a task (`surgery.eval.session`)."""
    from surgery.evaluation.kinds import TASKS

    TASKS.register(name, build)


def register_method(structure: str, name: str, method: Any) -> None:
    """A named method of a structure that takes some, as ``--to lowrank`` and ``--to gqa``.

    Args:
        method: a :class:`surgery.transforms.low_rank_methods.Method` or :class:`surgery.transforms.kv_heads.Method`.

    Raises:
        SurgeryError: another structure, whose methods are not alike enough to be told by a few functions; or no Method.
    """
    from surgery.common.plugins import load
    from surgery.structures.registry import TARGETS

    places = {target.name: target.methods for target in TARGETS.working().values() if target.methods}
    if structure not in places:
        raise SurgeryError(f"methods of {structure!r} cannot be added: choose {', '.join(places)}")
    load(places[structure]).register(name, method)
