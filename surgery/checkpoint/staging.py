"""Atomic creation of an output folder.

All files are written to ``<out>.partial``, which is renamed at the end. A marker in it is locked while a process works.
A subfolder holds the state from which an interrupted run resumes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import IO

from surgery.checkpoint.disk import (
    check_encoding,
    disk_errors,
    free_bytes,
    other_disk,
    sync_folder,
    sync_tree,
    tree_bytes,
)
from surgery.common.errors import SurgeryError
from surgery.common.file_lock import hold, is_at
from surgery.common.human import size
from surgery.common.interruption import resumes_from
from surgery.common.ownership import check_replaceable, first_foreign

MARKER = ".surgery-partial"
UNFINISHED = ".surgery-unfinished"
_FORGOTTEN = ".surgery-forgotten"
# Margin for files of unknown size: tokenizer, report, plots.
_SPARE_BYTES = 64 * 10**6


def check_output(source: Path, out: Path) -> None:
    """Refuse an output that would overwrite its source.

    Raises SurgeryError: ``out`` (or the ``.partial`` folder next to it) is the source, lies inside it or contains it.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    check_encoding(out)
    for folder in (out, _partial_of(out)):
        if folder == source:
            raise SurgeryError.at(out, "the output would replace its own source; choose another --out")
        if source in folder.parents:
            raise SurgeryError.at(out, f"the output lies inside its source {source}; choose another --out")
        if folder in source.parents:
            raise SurgeryError.at(out, f"the output contains its source {source}; choose another --out")


class NoSpace(SurgeryError):
    """The disk has less free space than the output needs."""


class Staging:
    """The staging folder ``partial`` that becomes ``out``.

    The constructor only checks and changes nothing. Then call `create`, and `commit` or `discard`. Raises SurgeryError:
    ``out`` exists, is not empty and may not be replaced, or ``out.partial`` is not ours.
    """

    def __init__(self, out: Path, *, overwrite: bool):
        # Resolved: for a link to a folder the target is replaced, on the target's disk.
        self.out = Path(out).expanduser().resolve()
        if not self.out.name:
            raise SurgeryError.at(out, "cannot be an output folder; choose another --out")
        self.partial = _partial_of(self.out)
        self._overwrite = overwrite
        self._lock: IO | None = None
        with disk_errors(self.out):
            check_out(self.out, overwrite=overwrite)
            self._check_leftover()

    def check_space(self, needed: int) -> None:
        """Raise NoSpace if the disk has less free space than ``needed`` bytes plus a margin."""
        with disk_errors(self.out):
            # A leftover is removed before writing.
            free = free_bytes(self.out.parent) + tree_bytes(self.partial) - tree_bytes(self.partial / UNFINISHED)
        if needed + _SPARE_BYTES > free:
            other, amount = other_disk(self.out), size(needed + _SPARE_BYTES)
            message = f"needs {amount}, the disk has {size(free)} free; free some or {other}"
            raise NoSpace.at(self.out, message, hint=other)

    def create(self, *, keep_unfinished: bool = False) -> None:
        """Create the empty partial folder and missing parents; clears a leftover, except unfinished work if kept.

        Raises SurgeryError: the leftover is not ours, another process is writing it, or a disk error occurs.
        """
        with disk_errors(self.partial):
            if not self._check_leftover():
                self.partial.mkdir(parents=True)
            try:
                # Locked before removing anything: another process may have passed the same checks.
                self._lock = hold(self.partial / MARKER, self.partial)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.partial.rmdir()  # fails if another process has added files
                raise
        try:
            with disk_errors(self.partial):
                resumes_from(self.partial)
                self._clear(keep_unfinished=keep_unfinished)
        except BaseException:
            self.discard(keep_unfinished=keep_unfinished)
            raise

    def sync(self) -> None:
        """Flush the partial folder to disk."""
        with disk_errors(self.partial):
            sync_tree(self.partial)

    def commit(self) -> None:
        """Flush the partial folder to disk and rename it to ``out``; an old output is removed only after that."""
        with disk_errors(self.out):
            check_out(self.out, overwrite=self._overwrite)  # again: the conversion may have taken hours
            self._forget()
            self.sync()  # again: files may have been added
            if self.out.exists() and any(self.out.iterdir()):
                self._replace()
            else:
                os.rename(self.partial, self.out)
            self._unlock()
            sync_folder(self.out.parent)

    def discard(self, *, keep_unfinished: bool = False) -> None:
        """Remove the partial folder, also after an interruption; does nothing after a commit."""
        # Suppressed so as not to hide the original error; with the marker, the next run can remove the rest.
        with contextlib.suppress(OSError):
            if self._lock is not None and is_at(self._lock, self.partial / MARKER):
                self._clear(keep_unfinished=keep_unfinished)
                if os.listdir(self.partial) == [MARKER]:
                    (self.partial / MARKER).unlink()
                    self.partial.rmdir()
        self._unlock()

    def _check_leftover(self) -> bool:
        """Return whether there is a partial folder; refuse one that is not ours or that another process is writing."""
        if not os.path.lexists(self.partial):
            return False
        marker = self.partial / MARKER
        is_folder = self.partial.is_dir() and not self.partial.is_symlink()
        if is_folder and marker.is_file() and not marker.is_symlink():
            hold(marker, self.partial).close()
        elif not is_folder or any(self.partial.iterdir()):  # a run killed before it wrote the marker leaves it empty
            raise SurgeryError.at(
                self.partial, "exists and was not written by surgery; remove it or choose another --out"
            )
        return True

    def _clear(self, *, keep_unfinished: bool) -> None:
        """Remove all files from the partial folder except the marker, and unfinished work if kept."""
        if not keep_unfinished:
            self._forget()
        for path in self.partial.iterdir():
            if path.is_dir() and not path.is_symlink():
                if path.name != UNFINISHED:
                    shutil.rmtree(path)
            elif path.name != MARKER:
                path.unlink()

    def _forget(self) -> None:
        """Remove unfinished work. It is renamed first, so that no run resumes from a half-removed state."""
        forgotten = self.partial / _FORGOTTEN
        shutil.rmtree(forgotten, ignore_errors=True)
        if (self.partial / UNFINISHED).exists():
            os.rename(self.partial / UNFINISHED, forgotten)
            shutil.rmtree(forgotten)

    def _replace(self) -> None:
        """Replace the old output with the new one; restore the old one on failure."""
        old = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.replaced-", dir=self.out.parent))
        try:
            os.rename(self.out, old)
            os.rename(self.partial, self.out)
        finally:
            # After a signal during a rename, the existing name tells whether it happened.
            if not self.out.exists():
                os.rename(old, self.out)
            elif first_foreign(old) is None:  # again: it can no longer change under its name
                shutil.rmtree(old, ignore_errors=True)
            if old.exists():
                warnings.warn(f"{old}: the replaced output could not be removed; remove it", stacklevel=2)

    def _unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                if is_at(self._lock, self.out / MARKER):
                    (self.out / MARKER).unlink()
            self._lock.close()
            self._lock = None


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that may not be created or replaced.

    Raises SurgeryError: it is a file, exists without ``overwrite``, or contains files that this program did not write.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise SurgeryError.at(out, "is a file; choose another --out")
    if any(out.iterdir()):
        if not overwrite:
            raise SurgeryError.at(out, "exists; choose another --out or pass --overwrite")
        check_replaceable(out)


def _partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial") if out.name else out
