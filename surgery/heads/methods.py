"""Registry of methods that score heads, by name. Imports torch only when a scorer is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgery.common.plugins import Registry, load
from surgery.heads.settings import METHODS

if TYPE_CHECKING:
    from surgery.heads.scorer import Scorer

SCORERS: Registry[str | Scorer] = Registry(
    "scorers", {name: f"surgery.heads.{name.replace('-', '_')}:score" for name in METHODS}
)
"""Scorers or their import paths (module:name), including plugins of installed packages."""


def scorer(name: str) -> Scorer:
    """Return the scorer of a method."""
    scorer_path = SCORERS[name]
    return load(scorer_path) if isinstance(scorer_path, str) else scorer_path
