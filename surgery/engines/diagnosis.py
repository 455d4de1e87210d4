"""``surgery doctor``: a checkpoint's table of engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.engines.facts import Facts
from surgery.engines.table import verdicts
from surgery.engines.verdict import Verdict


@dataclass(frozen=True)
class Diagnosis:
    """What engines do with one checkpoint."""

    path: str
    facts: Facts
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        engines = [verdict.to_dict() for verdict in self.verdicts]
        return {"path": self.path, "kind": self.facts.kind, **asdict(self.facts), "engines": engines}


def diagnose(checkpoint: str | Path) -> Diagnosis:
    """Reads a checkpoint's config.json and asks every engine.

    Raises:
        SurgeryError: there is no checkpoint, or its config does not say what engines want to know.
    """
    reader = CheckpointReader.open(checkpoint).as_stored
    try:
        return Diagnosis(str(checkpoint), Facts.of(reader.config), tuple(verdicts(reader.config, str(checkpoint))))
    except KeyError as error:
        raise SurgeryError(f"{reader.path}: config.json does not say {error}") from None
