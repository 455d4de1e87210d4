"""File names made from arbitrary text. Needs no torch."""

from __future__ import annotations

import re

_LONGEST = 80


def file_name(text: object, otherwise: str) -> str:
    """Make a safe file name: dashes replace special characters, separators included; `otherwise` if nothing is left."""
    return re.sub(r"[^\w.+-]+", "-", str(text)).strip("-.")[:_LONGEST] or otherwise
