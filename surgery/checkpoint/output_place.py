"""Output path of a command, and the paths that it may not replace. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.checkpoint.staging import check_out, check_output
from surgery.common.errors import SurgeryError
from surgery.common.file_lock import hold, is_at

LOCK = ".surgery-lock"


def default_output(source: str | Path, target: str) -> Path:
    """Next to the source, its name with the target after it; in the working folder for a hub id."""
    path = Path(source)
    if path.name in ("", ".."):  # a folder is called as its place is
        path = Path(os.path.abspath(path))
    if path.is_file():  # a GGUF file
        return path.with_name(f"{path.stem}-{target}")
    return path.parent / f"{path.name}-{target}" if path.is_dir() else Path(f"{path.name}-{target}")


def working_output(source: str | Path, ending: str) -> Path:
    """Return a path in the working folder, named after the source; next to the source where that lies in the working
    folder."""
    beside, folder = default_output(source, ending), Path.cwd()
    place = Path(source).resolve()
    return beside if place in (folder, *folder.parents) else Path(beside.name)


def refuse_inside(source: Path, out: Path) -> None:
    """Refuses an output that would lie among the files of a checkpoint, and be taken for some of them.

    Raises:
        SurgeryError: it would.
    """
    source, place = source.resolve(), Path(out).resolve()
    if source in (place, *place.parents):
        raise SurgeryError.at(out, f"lies inside the checkpoint {source}; choose another --out")


def settle_output(
    source: str | Path, read: Path | None, out: str | Path | None, target: str, *, overwrite: bool
) -> Path:
    """Settle the output path.

    Args:
        read: the folder or file that ``source`` is read from; None for a hub model that nobody fetched yet.
        out: as asked for; an empty folder is taken.

    Raises:
        SurgeryError: the output exists and may not be replaced, or is the source.
    """
    out = Path(out) if out else default_output(source, target)
    if read is not None:
        check_output(read, out)
    try:
        check_out(out.expanduser(), overwrite=overwrite)
    except OSError as error:
        raise SurgeryError.at(out, f"{error.strerror or error}; choose another --out") from None
    return out


@contextmanager
def kept_apart(place: Path, option: str = "--out") -> Iterator[None]:
    """Refuses other processes the same output while the block runs, by a locked file that goes with it.

    What SIGKILL leaves of that file is locked by nobody, and goes with the next block.

    Args:
        place: a folder, in which the file lies, or the name of a file, next to which it does.
        option: that names it.

    Raises:
        SurgeryError: another process is writing there, or nobody can.
    """
    path = place / LOCK if place.is_dir() else place.with_name(f".{place.name}{LOCK}")
    try:
        file = hold(path, place, option)
    except OSError as error:
        raise SurgeryError(f"{place}: {error.strerror or error}; choose another {option}") from error
    try:
        yield
    finally:
        with file, suppress(OSError):  # Windows removes no open file
            if is_at(file, path) and not path.stat().st_size:
                path.unlink()
