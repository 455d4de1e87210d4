"""Conversions in a line, for tests."""

from surgery.structures import converter
from surgery.structures.registry import TARGETS
from surgery.structures.request import ConversionRequest

STRUCTURE_TARGETS = {name for name, target in TARGETS.items() if not target.fixed}
"""Every target of `--to` but names of another's settings (`mqa`)."""


def convert_checkpoint(source, out, settings, *, shared=False, progress=None, **options):
    """Convert; options are fields of a request."""
    return converter.convert(ConversionRequest(source, out, settings, **options), shared=shared, progress=progress)
