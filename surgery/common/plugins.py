"""Plug-in registries: the project's own things, those that a program registers, and those that installed packages
announce by entry points. No torch, no import of a package before one of its kind is needed.

A package names what it brings in its pyproject.toml, one group a kind::

    [project.entry-points."model_surgery.structures"]
    mean = "my_package.mean_structure:TARGET"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from surgery.common.errors import SurgeryError
from surgery.common.visible import visible

Kind = TypeVar("Kind")

PREFIX = "model_surgery."

_registered: dict[str, dict[str, Any]] = {}


def load(place: str) -> Any:
    """Return the object at module:name."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def added(kind: str) -> tuple[str, ...]:
    """Names that programs registered or packages announce; nothing is loaded for it."""
    return tuple(dict.fromkeys((*_registered.get(kind, ()), *_announced(kind))))


class Registry(Mapping[str, Kind], Generic[Kind]):
    """Things of one kind by the names that users give them.

    Args:
        kind: in the plural, as in the group of entry points, ``model_surgery.KIND``.
        own: the project's; their names cannot be taken.
        of: the class that they are all of, if there is one.
    """

    def __init__(self, kind: str, own: Mapping[str, Kind], of: type[Kind] | None = None):
        self._kind, self._own, self._of = kind, dict(own), of

    def register(self, name: str, thing: Kind) -> None:
        """Adds one.

        Raises:
            SurgeryError: the name is taken, or it is of another class.
        """
        if name in self:
            raise SurgeryError(f"{self._kind}: there is a {name!r} already; choose another name")
        self._check(name, thing)
        _registered.setdefault(self._kind, {})[name] = thing

    def __getitem__(self, name: str) -> Kind:
        for things in (self._own, _registered.get(self._kind, {})):
            if name in things:
                return things[name]
        thing = _load(self._kind, _announced(self._kind)[name])
        self._check(name, thing)
        return thing

    def _check(self, name: str, thing: Any) -> None:
        if self._of is not None and not isinstance(thing, self._of):
            expected = f"{self._of.__module__}.{self._of.__name__}(...)"
            raise SurgeryError(f"{self._kind}: {name!r} is a {type(thing).__name__}: wrap it, {expected}")

    def working(self) -> dict[str, Kind]:
        """All but those of packages that cannot be loaded, which a line on standard error tells."""
        entries = {}
        for name in self:
            try:
                entries[name] = self[name]
            except SurgeryError as error:
                _tell_once(str(error))
        return entries

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._own, *added(self._kind))))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in added(self._kind)


@cache
def _announced(kind: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PREFIX + kind)}


@cache
def _load(kind: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever a package of somebody else does when it is imported
        where = point.dist.name if point.dist else point.value
        raise SurgeryError(f"{kind}: {point.name!r} of {where} cannot be loaded ({error})") from error


@cache
def _tell_once(problem: str) -> None:
    print(f"surgery: note: {visible(problem)}", file=sys.stderr)
