"""Prefetch of what is needed next into the system's page cache, while this process computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PIECE = 2**17
"""Bytes of one request: Linux cuts longer ones to what a disk's settings have it read ahead, 128 KiB by default."""


class Place(NamedTuple):
    """Byte range of a tensor in a file."""

    file: Path
    offset: int
    size: int


class ReadAhead:
    """Asks for bytes by a thread of its own; what is asked for while it is busy is left out.

    Nothing depends on it: what cannot be read is reported by who needs it, and systems without such requests get none.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def ask(self, places: Iterable[Place]) -> None:
        """Returns at once."""
        if hasattr(os, "posix_fadvise") and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=_ask, args=(sorted(set(places)),), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until all was asked for."""
        if self._thread is not None:
            self._thread.join()


def _ask(places: list[Place]) -> None:
    for place in places:
        with suppress(OSError), open(place.file, "rb", buffering=0) as file:
            for offset in range(place.offset, place.offset + place.size, PIECE):
                os.posix_fadvise(file.fileno(), offset, PIECE, os.POSIX_FADV_WILLNEED)
