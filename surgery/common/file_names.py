"""Names of files that are made of names of other things. Needs no torch."""

from __future__ import annotations

import re

_LONGEST = 80


def file_name(text: object, otherwise: str) -> str:
    """Make a plain file name: other letters than those of words become dashes, and no name leads out of its folder."""
    return re.sub(r"[^\w.+-]+", "-", str(text)).strip("-.")[:_LONGEST] or otherwise
