"""Names of an evaluation's models on the command line and in recipes. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from surgery.checkpoint.location import existing
from surgery.common.errors import SurgeryError


def name_and_path(text: str) -> tuple[str, str]:
    """Row name and path of an argument; ``name=path``, unless there is a path with that sign in it."""
    name, sign, path = text.partition("=")
    if not sign or existing(text):
        name, path = Path(text.rstrip("/")).name, text
        if name in ("", ".."):  # a folder is called as its path is
            name = Path(os.path.abspath(text)).name or text
    if not name or not path:
        raise SurgeryError(f"{text!r}: give a checkpoint folder or hub id, or NAME=PATH")
    return name, path
