"""Standard output that is closed, full or read no further: what a command wrote elsewhere is whole all the same."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from surgery.common.errors import SurgeryError


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as by ``>&-``.

    Otherwise the next file that is opened would get its number, and prints would end in it.
    """
    for number in (0, 1, 2):  # in rising order: the system gives the lowest free one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


def leave_unread() -> None:
    """Send what is still printed nowhere: nobody reads standard output any more."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Flush what the block prints. A reader that has left, as ``head`` does, is no error.

    Raises:
        SurgeryError: standard output cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        leave_unread()
    except OSError as error:
        leave_unread()  # or the flush at the end of the process fails again
        raise SurgeryError(
            f"standard output: {(error.strerror or str(error)).lower()}; what the command wrote to files is whole"
        ) from error
