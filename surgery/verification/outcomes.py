"""What a verification found: one outcome a check, for tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from surgery.common.errors import SurgeryError

GOOD: Literal["good"] = "good"
WRONG: Literal["wrong"] = "wrong"
UNCHECKED: Literal["not checked"] = "not checked"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        said: what was found, or why nothing could be.
    """

    name: str
    outcome: Literal["good", "wrong", "not checked"]
    said: str


@dataclass
class Verified:
    """What :func:`surgery.verify` found.

    Attributes:
        path: the folder or file.
        report: name of the report that it was held to; None where there is none.
        checks: one after the other; a check that others need is before them.
    """

    path: Path
    report: str | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was found to be wrong."""
        return not self.wrong

    @property
    def wrong(self) -> list[Check]:
        """Checks that found something."""
        return [check for check in self.checks if check.outcome == WRONG]

    @property
    def unchecked(self) -> list[Check]:
        """Checks that could not be made."""
        return [check for check in self.checks if check.outcome == UNCHECKED]

    def say(self, name: str, outcome: Literal["good", "wrong", "not checked"], said: str) -> None:
        """Adds an outcome."""
        self.checks.append(Check(name, outcome, said))

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """What goes wrong in the block is an outcome of that check."""
        try:
            yield
        except SurgeryError as error:
            self.say(name, WRONG, str(error).removeprefix(f"{self.path}: ").removeprefix(f"{self.path}/"))

    def raise_if_wrong(self) -> None:
        """Raises SurgeryError, in one line what is wrong, where something is."""
        if self.good:
            return
        found = "; ".join(f"{check.name}: {check.said}" for check in self.wrong)
        raise SurgeryError(f"{self.path}: {len(self.wrong)} of {len(self.checks)} checks found something: {found}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [asdict(check) for check in self.checks]
        return {"path": str(self.path), "good": self.good, "report": self.report, "checks": checks}
