"""``surgery doctor``: compatibility of a checkpoint with all engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.engines.facts import Facts
from surgery.engines.number_formats import ruinous_formats
from surgery.engines.table import verdicts_on
from surgery.engines.verdict import Verdict


@dataclass(frozen=True)
class Diagnosis:
    """Verdicts of all engines on one checkpoint.

    Attributes:
        ruined_by: weight or cache formats in which the checkpoint produces garbage, as far as its tensors show.
    """

    path: str
    facts: Facts
    verdicts: tuple[Verdict, ...]
    ruined_by: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        engines = [verdict.to_dict() for verdict in self.verdicts]
        facts = {"path": self.path, "kind": self.facts.kind, **asdict(self.facts)}
        return {**facts, "engines": engines, "ruined_by": list(self.ruined_by)}


def diagnose(checkpoint: str | Path) -> Diagnosis:
    """Collect the engines' verdicts from config.json, and for stock MLA ruinous formats from the latent projections.

    Raises:
        SurgeryError: there is no checkpoint, or its config lacks an entry that the verdicts need.
    """
    opened = CheckpointReader.open(checkpoint)
    reader = opened.as_stored
    try:
        answers = tuple(verdicts_on(reader, str(checkpoint)))
        return Diagnosis(str(checkpoint), Facts.of(reader.config), answers, tuple(ruinous_formats(opened)))
    except KeyError as error:
        raise SurgeryError.at(reader.source, f"config.json: {error} is missing") from None
