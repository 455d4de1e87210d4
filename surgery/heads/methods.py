"""The ways to score heads, by the names that users give. Needs no torch before one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry, load
from surgery.common.setting import did_you_mean
from surgery.heads.settings import METHODS

if TYPE_CHECKING:
    from surgery.heads.scorer import Scorer

SCORERS: Registry[str | Scorer] = Registry(
    "scorers", {name: f"surgery.heads.{name.replace('-', '_')}:score" for name in METHODS}
)
"""Scorers of heads, or their places (module:name); those of installed packages among them."""


def scorer(name: str) -> Scorer:
    """Return the scorer of a method.

    Raises:
        SurgeryError: there is no such method.
    """
    if name not in SCORERS:
        raise SurgeryError(
            f"method {name!r} is unknown: choose {', '.join(SCORERS)}{did_you_mean(name, list(SCORERS))}",
            setting="method",
        )
    scorer_path = SCORERS[name]
    return load(scorer_path) if isinstance(scorer_path, str) else scorer_path
