"""Handling of closed, full or abandoned standard output, which must not spoil files that a command wrote."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from surgery.common.errors import SurgeryError


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as by ``>&-``.

    Otherwise the next opened file gets its file descriptor, and prints go into that file.
    """
    for number in (0, 1, 2):  # in ascending order: open() returns the lowest free descriptor
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


def leave_unread() -> None:
    """Redirect standard output to the null device after its reader has left."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Flush the output of the block. A reader that closes the pipe early, as ``head`` does, is not an error.

    Raises SurgeryError: standard output cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        leave_unread()
    except OSError as error:
        leave_unread()  # the flush at interpreter exit would fail again
        raise SurgeryError(
            f"standard output: {(error.strerror or str(error)).lower()}; the files that the command wrote are complete"
        ) from error
