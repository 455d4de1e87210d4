"""Plug-in registries: built-in objects, objects registered by a program, and entry points of installed packages.

No torch; a package is imported when one of its plug-ins is first used. A package declares plug-ins in its
pyproject.toml, with one group per kind::

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


def load(reference: str) -> Any:
    """Import the object at ``module:name``."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def added(kind: str) -> tuple[str, ...]:
    """List the names that programs registered or packages declare, without importing them."""
    return tuple(dict.fromkeys((*_registered.get(kind, ()), *_announced(kind))))


class Registry(Mapping[str, Kind], Generic[Kind]):
    """Mapping from names to the plug-ins of one kind, a plural noun as in the entry-point group ``model_surgery.KIND``.

    Names of built-in objects cannot be registered again; all objects must be instances of ``of``, if any.
    """

    def __init__(self, kind: str, own: Mapping[str, Kind], of: type[Kind] | None = None):
        self._kind, self._own, self._of = kind, dict(own), of

    def register(self, name: str, thing: Kind) -> None:
        """Register an object under a new name.

        Raises SurgeryError: the name is taken, or the object is not an instance of the required class.
        """
        if name in self:
            raise SurgeryError(f"{self._kind}: {name!r} is already registered; choose another name")
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
            raise SurgeryError(f"{self._kind}: {name!r} is a {type(thing).__name__}; wrap it in {expected}")

    def working(self) -> dict[str, Kind]:
        """Load all objects; those of packages that fail to load are left out with a note on standard error."""
        entries = {}
        for name in self:
            try:
                entries[name] = self[name]
            except SurgeryError as error:
                _tell_once(str(error))
        return entries

    def distribution(self, name: str) -> str | None:
        """Return name and version of the package that declares a plug-in; None without one."""
        is_here = name in self._own or name in _registered.get(self._kind, {})
        dist = None if is_here else _announced(self._kind)[name].dist
        return f"{dist.name} {dist.version}" if dist else None

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
    except Exception as error:  # importing a third-party package can raise anything
        where = point.dist.name if point.dist else point.value
        raise SurgeryError(f"{kind}: {point.name!r} of {where} cannot be loaded ({error})") from error


@cache
def _tell_once(problem: str) -> None:
    print(f"surgery: note: {visible(problem)}", file=sys.stderr)
