"""Conversions in a line, for tests."""

from surgery.structures import converter
from surgery.structures.request import ConversionRequest


def convert_checkpoint(source, out, settings, *, shared=False, progress=None, **options):
    """Convert; options are fields of a request."""
    return converter.convert(ConversionRequest(source, out, settings, **options), shared=shared, progress=progress)
