"""What can be plugged in: registries of the project's own things, those that a program registers, and those that
installed packages announce by entry points. No torch, no import of a package before one of its kind is asked for.

A package names what it brings in its pyproject.toml, one group a kind::

    [project.entry-points."model_surgery.structures"]
    mean = "my_package.mean_structure:TARGET"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from surgery.common.errors import SurgeryError

Kind = TypeVar("Kind")

PREFIX = "model_surgery."


class Registry(Mapping[str, Kind], Generic[Kind]):
    """Things of one kind by the names that users give them.

    Args:
        kind: in the plural, as in the group of entry points, ``model_surgery.KIND``.
        own: the project's.
    """

    def __init__(self, kind: str, own: Mapping[str, Kind]):
        self._kind, self._own, self._announced = kind, dict(own), None

    def register(self, name: str, thing: Kind) -> None:
        """Adds one.

        Raises:
            SurgeryError: the name is taken.
        """
        if name in self:
            raise SurgeryError(f"{self._kind}: there is a {name!r} already; choose another name")
        self._own[name] = thing

    def __getitem__(self, name: str) -> Kind:
        if name not in self._own:
            point = self._points()[name]
            try:
                self._own[name] = point.load()
            except Exception as error:  # whatever a package of somebody else does when it is imported
                where = point.dist.name if point.dist else point.value
                raise SurgeryError(f"{self._kind}: {name!r} of {where} cannot be loaded ({error})") from error
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in self._points() if name not in self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._points()

    def _points(self) -> dict:
        """The entry points of installed packages by name; the project's own things win."""
        if self._announced is None:
            self._announced = {point.name: point for point in entry_points(group=PREFIX + self._kind)}
        return self._announced
