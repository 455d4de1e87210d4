"""Conversions in a line, for tests."""

import json
from pathlib import Path

from surgery.structures import converter
from surgery.structures.registry import TARGETS
from surgery.structures.request import ConversionRequest

STRUCTURE_TARGETS = {name for name, target in TARGETS.items() if not target.fixed}
"""Every target of `--to` but names of another's settings (`mqa`)."""


def convert_checkpoint(source, out, settings, *, progress=None, **options):
    """Convert; options are fields of a request."""
    return converter.convert(ConversionRequest(source, out, settings, **options), progress=progress)


def results(out: Path) -> tuple[bytes, list]:
    """The weights' bytes, and what the report measured: what an interruption may not change."""
    report = json.loads((out / "surgery_report.json").read_text())
    return (out / "model.safetensors").read_bytes(), [report[name] for name in ("layers", "ladder", "target")]
