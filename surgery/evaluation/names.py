"""Row names of an evaluation's models on the command line and in recipes. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from surgery.checkpoint.location import existing
from surgery.common.errors import SurgeryError


def name_and_path(text: str) -> tuple[str, str]:
    """Split ``name=path`` into row name and path; an existing path that contains "=" is not split."""
    name, sign, path = text.partition("=")
    if not sign or existing(text):
        name, path = Path(text.rstrip("/")).name, text
        if name in ("", ".."):  # take the name of the absolute path
            name = Path(os.path.abspath(text)).name or text
    if not name or not path:
        raise SurgeryError(f"{text!r}: give a checkpoint folder or hub id, or NAME=PATH")
    return name, path
