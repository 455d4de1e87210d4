"""The ways to score heads, by the names that users give."""

from __future__ import annotations

from importlib import import_module

from surgery.common.errors import SurgeryError
from surgery.heads.scorer import Scorer
from surgery.heads.settings import METHODS


def scorer(name: str) -> Scorer:
    """What scores heads by the method of this name: function ``score`` of the module of the same name.

    Raises:
        SurgeryError: there is no such method.
    """
    if name not in METHODS:
        raise SurgeryError(f"method {name!r} is unknown: choose {', '.join(METHODS)}")
    return import_module(f"surgery.heads.{name.replace('-', '_')}").score
