"""Atomic creation of an output folder.

All files are written to ``<out>.partial``, which is renamed at the end. Its ledger lists every file before it is
written, and is locked while a process works. A subfolder holds the state from which an interrupted run resumes.
"""

from __future__ import annotations

import contextlib
import glob
import os
import warnings
from pathlib import Path
from typing import TextIO

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
from surgery.common.file_lock import hold
from surgery.common.human import size
from surgery.common.interruption import resumes_from
from surgery.common.ownership import (
    IsOwned,
    Ledger,
    check_replaceable,
    first_foreign,
    matching,
    owned_result,
    remove_owned,
)

MARKER = ".surgery-partial"
UNFINISHED = ".surgery-unfinished"
WORK_FILES = ("facts.json", "*.state", "*/[0-9]*", ".*.partial", "*/.*.partial")
"""Files in the folder of unfinished work: its facts, loop states, one file per layer, and temporary files."""
_FORGOTTEN = ".surgery-forgotten"
_REPLACED, _REPLACED_MARKER = ".replaced-", ".surgery-replaced"
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
        self._ledger = Ledger(self.partial / MARKER)
        self._lock: TextIO | None = None
        self._created = False
        self._made_parents: list[Path] = []
        with disk_errors(self.out):
            self._check_out()
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

    def claim(self, *names: str) -> None:
        """Record files of the output, by relative path, before they are written."""
        with disk_errors(self.partial):
            self._ledger.claim_files(*names)

    def claim_like(self, folder: Path, *patterns: str) -> None:
        """Record files with the same relative paths as those of a folder, and files that match patterns."""
        with disk_errors(self.partial):
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            self._ledger.claim_files(*names)
            self._ledger.claim(*patterns)

    def create(self, *, keep_unfinished: bool = False) -> None:
        """Create the empty partial folder and missing parents; clears a leftover, except unfinished work if kept.

        Raises SurgeryError: the leftover contains a file that no run of this program wrote, or a disk error occurs.
        """
        try:
            with disk_errors(self.partial):
                self._check_leftover()
                for parent in reversed([p for p in self.partial.parents if not p.exists()]):
                    parent.mkdir()
                    self._made_parents.insert(0, parent)
                self.partial.mkdir(exist_ok=True)
                # Locked before removing anything: another process may have passed the same checks.
                self._lock = hold(self.partial / MARKER, self.partial)
                self._refuse_foreign()
                self._created = True
                resumes_from(self.partial)
                self._clear(keep_unfinished=keep_unfinished)
                self._ledger.open(self._lock)
                self._ledger.claim(*(f"{folder}/{name}" for folder in (UNFINISHED, _FORGOTTEN) for name in WORK_FILES))
        except BaseException:
            if not self._created:
                with contextlib.suppress(OSError):
                    self.partial.rmdir()  # fails if another process has added files
            self.discard(keep_unfinished=keep_unfinished)
            raise

    def sync(self) -> None:
        """Flush the partial folder to disk."""
        with disk_errors(self.partial):
            sync_tree(self.partial)

    def commit(self) -> None:
        """Flush the partial folder to disk and rename it to ``out``; an old output is removed only after that."""
        with disk_errors(self.out):
            self._check_out()  # again: the conversion may have taken hours
            self._remove_unfinished()
            self.sync()  # again: files may have been added
            if self.out.exists() and any(self.out.iterdir()):
                self._replace()
            else:
                if self.out.exists():
                    self.out.rmdir()  # fails, as intended, if another process has added files
                os.rename(self.partial, self.out)
            # Only now: without its marker, a partial folder belongs to no run.
            with contextlib.suppress(OSError):
                (self.out / MARKER).unlink()
            self._created = False
            self._unlock()
            sync_folder(self.out.parent)

    def discard(self, *, keep_unfinished: bool = False) -> None:
        """Remove what `create` and later writes made, also after an interruption; does nothing after a commit."""
        # Suppressed so as not to hide the original error; with the marker, the next run can remove the rest.
        with contextlib.suppress(OSError):
            if self._created and self._clear(keep_unfinished=keep_unfinished):
                (self.partial / MARKER).unlink()
                self.partial.rmdir()
        self._unlock()
        with contextlib.suppress(OSError):
            for parent in self._made_parents:
                parent.rmdir()  # fails, as intended, if another process has added files

    def _check_out(self) -> None:
        check_out(self.out, overwrite=self._overwrite)

    def _check_leftover(self) -> None:
        """Refuse a partial folder that is not ours, contains a foreign file, or that another process is writing."""
        if not os.path.lexists(self.partial):
            return
        if self.partial.is_symlink() or not self.partial.is_dir():
            raise SurgeryError.at(
                self.partial, "exists and was not written by surgery; remove it or choose another --out"
            )
        marker = self.partial / MARKER
        if marker.is_symlink() or not marker.is_file():
            # A run killed between creating the folder and its marker leaves an empty folder.
            if any(self.partial.iterdir()):
                raise SurgeryError.at(
                    self.partial, "exists and was not written by surgery; remove it or choose another --out"
                )
            return
        hold(marker, self.partial).close()
        self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        foreign = first_foreign(self.partial, self._owned(MARKER))
        if foreign is not None:
            raise SurgeryError.at(
                self.partial,
                f"contains {foreign}, which the unfinished run did not write; move it away, or choose another --out",
            )

    def _owned(self, *more: str, excluded: str = "") -> IsOwned:
        """Return a predicate that owns the recorded files and additional names, except files in folder ``excluded``."""
        is_listed, is_more = self._ledger.owned(), matching(more)
        return lambda path: is_more(path) or (is_listed(path) and not (excluded and path.startswith(f"{excluded}/")))

    def _clear(self, *, keep_unfinished: bool) -> bool:
        """Remove all files of runs from the partial folder except the ledger; return whether only that is left."""
        if not keep_unfinished:
            self._remove_unfinished()
        remove_owned(self.partial, self._owned(excluded=UNFINISHED if keep_unfinished else ""))
        return [path.name for path in self.partial.iterdir()] == [MARKER]

    def _remove_unfinished(self) -> None:
        """Remove unfinished work. It is renamed first, so that no run resumes from a half-removed state."""
        forgotten, is_owned = self.partial / _FORGOTTEN, matching(WORK_FILES)
        if os.path.lexists(forgotten):
            remove_owned(forgotten, is_owned)
        if os.path.lexists(self.partial / UNFINISHED):
            os.rename(self.partial / UNFINISHED, forgotten)
            remove_owned(forgotten, is_owned)

    def _replace(self) -> None:
        """Replace the old output with the new one; restore the old one on failure."""
        old = self.out.with_name(f"{self.out.name}{_REPLACED}{os.getpid()}")
        while os.path.lexists(old):
            old = old.with_name(f"{old.name}0")
        os.rename(self.out, old)
        try:
            os.rename(self.partial, self.out)
        finally:
            # After a signal during the rename, the existing name tells whether it happened.
            if self.out.exists():
                (old / _REPLACED_MARKER).touch()
                self._remove_replaced()
            else:
                os.rename(old, self.out)

    def _remove_replaced(self) -> None:
        """Remove replaced outputs, also those left by killed processes."""
        for old in self.out.parent.glob(f"{glob.escape(self.out.name)}{_REPLACED}[0-9]*"):
            marker = old / _REPLACED_MARKER
            if old.is_symlink() or not marker.is_file():
                continue
            try:
                is_result = owned_result(old, _REPLACED_MARKER)[0]
                stays = remove_owned(old, is_result)
            except OSError as error:
                stays = str(error)
            if stays is not None:
                # The new output is complete, so this is not an error.
                warnings.warn(f"{old}: the replaced output could not be removed ({stays}); remove it", stacklevel=2)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._ledger.close()
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


def owned_partial(partial: Path) -> IsOwned:
    """Return a predicate that owns the recorded files of a partial folder, and its ledger."""
    is_listed, is_marker = Ledger(partial / MARKER).owned(), matching([MARKER])
    return lambda path: is_listed(path) or is_marker(path)


def _partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial") if out.name else out
