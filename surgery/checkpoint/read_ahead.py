"""Prefetch of tensors into the page cache while this process computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PIECE = 2**17
"""Bytes per request: Linux truncates longer requests to the disk's read-ahead setting, 128 KiB by default."""


class FileRange(NamedTuple):
    """Byte range of a tensor in a file."""

    file: Path
    offset: int
    size: int


class ReadAhead:
    """Background thread that prefetches byte ranges; requests are dropped while it is busy.

    This is only a hint: read errors are ignored here, and systems without ``posix_fadvise`` prefetch nothing.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def ask(self, file_ranges: Iterable[FileRange]) -> None:
        """Start prefetching byte ranges, without blocking."""
        if hasattr(os, "posix_fadvise") and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=_prefetch, args=(sorted(set(file_ranges)),), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all requests are sent."""
        if self._thread is not None:
            self._thread.join()


def _prefetch(file_ranges: list[FileRange]) -> None:
    for file_range in file_ranges:
        with suppress(OSError), open(file_range.file, "rb", buffering=0) as file:
            for offset in range(file_range.offset, file_range.offset + file_range.size, PIECE):
                os.posix_fadvise(file.fileno(), offset, PIECE, os.POSIX_FADV_WILLNEED)
