"""Output paths of commands, and checks that they may be written. Needs no torch."""

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
    """Return the default output path ``SOURCE-TARGET``, next to a local source, in the working folder for a hub id."""
    path = Path(source)
    if path.name in ("", ".."):  # such as "." and "..": use the folder's actual name
        path = Path(os.path.abspath(path))
    if path.is_file():  # a GGUF file
        return path.with_name(f"{path.stem}-{target}")
    return path.parent / f"{path.name}-{target}" if path.is_dir() else Path(f"{path.name}-{target}")


def working_output(source: str | Path, ending: str) -> Path:
    """Return an output path in the working folder; next to the source if that contains the working folder."""
    default, folder = default_output(source, ending), Path.cwd()
    source_path = Path(source).resolve()
    return default if source_path in (folder, *folder.parents) else Path(default.name)


def refuse_output_inside(source: Path, out: Path) -> None:
    """Refuse an output inside a checkpoint folder, where it would be taken for a file of the checkpoint.

    Raises SurgeryError: the output lies inside.
    """
    source, output = source.resolve(), Path(out).resolve()
    if source in (output, *output.parents):
        raise SurgeryError.at(out, f"lies inside the checkpoint {source}; choose another --out")


def settle_output(
    source: str | Path, read: Path | None, out: str | Path | None, target: str, *, overwrite: bool
) -> Path:
    """Determine the output path and check that it may be written.

    Args:
        read: the folder or file that ``source`` is read from; None for a hub model that is not downloaded yet.
        out: the user's path, which may be an empty folder; None for the default.

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
def output_lock(output: Path, option: str = "--out") -> Iterator[None]:
    """Hold a lock file on an output during the block, so that no other process writes it.

    It lies in an output folder, or next to a file. One left by a killed process is unlocked; the next block removes it.
    Raises SurgeryError: another process is writing there, or the lock file cannot be created.
    """
    path = output / LOCK if output.is_dir() else output.with_name(f".{output.name}{LOCK}")
    try:
        file = hold(path, output, option)
    except OSError as error:
        raise SurgeryError(f"{output}: {error.strerror or error}; choose another {option}") from error
    try:
        yield
    finally:
        with file, suppress(OSError):  # Windows cannot remove open files
            if is_at(file, path) and not path.stat().st_size:
                path.unlink()
