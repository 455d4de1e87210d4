"""An output folder that appears whole or not at all.

Everything is written to ``<out>.partial`` and renamed at the end. A marker file in it says that it is ours to remove,
and carries a lock that says whether a process is still at work in it. A folder in it, which never becomes part of the
output, holds what an interrupted run goes on from.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import warnings
from pathlib import Path
from typing import TextIO

from surgery.checkpoint.disk import (
    check_encoding,
    disk_errors,
    format_size,
    free_bytes,
    sync_folder,
    sync_tree,
    tree_bytes,
)
from surgery.checkpoint.layout import CONFIG
from surgery.common.errors import SurgeryError
from surgery.common.file_lock import hold

MARKER = ".surgery-partial"
UNFINISHED = ".surgery-unfinished"
_FORGOTTEN = ".surgery-forgotten"
_REPLACED = ".replaced-"
# For what is not planned to the byte: tokenizer, report, plots.
_SPARE_BYTES = 64 * 10**6
# Windows neither renames nor removes a folder with an open file in it, and has none of these locks.
_CLOSED_FIRST = os.name == "nt"


def check_output(source: Path, out: Path) -> None:
    """Refuses an output that would destroy the checkpoint it is made from.

    Raises:
        SurgeryError: ``out`` (or the ``.partial`` folder beside it) is the source, lies inside it or contains it.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    check_encoding(out)
    for folder in (out, _partial_of(out)):
        if folder == source:
            raise SurgeryError(f"{out}: the output would replace its own source; choose another --out")
        if source in folder.parents:
            raise SurgeryError(f"{out}: the output lies inside its source {source}; choose another --out")
        if folder in source.parents:
            raise SurgeryError(f"{out}: the output contains its source {source}; choose another --out")


class NoSpace(SurgeryError):
    """A disk has less room than the result needs."""


class Staging:
    """The folder ``partial`` on its way to becoming ``out``.

    The constructor refuses what cannot end well and changes nothing; `create`, then `commit` or `discard`.

    Raises:
        SurgeryError: ``out`` exists, is not empty and may not be replaced, or ``out.partial`` is not ours.
    """

    def __init__(self, out: Path, *, overwrite: bool):
        # Resolved, so that a link to a folder has its target replaced, on the target's disk.
        self.out = Path(out).expanduser().resolve()
        if not self.out.name:
            raise SurgeryError(f"{out}: cannot be an output folder; choose another --out")
        self.partial = _partial_of(self.out)
        self._overwrite = overwrite
        self._lock: TextIO | None = None
        self._created = False
        self._made_parents: list[Path] = []
        with disk_errors(self.out):
            self._check_out()
            self._check_leftover()

    def check_space(self, needed: int) -> None:
        """Raises NoSpace where the disk has no room for ``needed`` bytes and some to spare."""
        with disk_errors(self.out):
            # A leftover goes before anything is written.
            free = free_bytes(self.out.parent) + tree_bytes(self.partial) - tree_bytes(self.partial / UNFINISHED)
        if needed + _SPARE_BYTES > free:
            raise NoSpace(
                f"{self.out}: needs {format_size(needed + _SPARE_BYTES)}, the disk has {format_size(free)} free;"
                " free some or choose another --out"
            )

    def create(self, *, keep_unfinished: bool = False) -> None:
        """Makes the empty partial folder, in place of a leftover, of which one folder may stay, and missing parents."""
        try:
            with disk_errors(self.partial):
                self._check_leftover()
                for parent in reversed([p for p in self.partial.parents if not p.exists()]):
                    parent.mkdir()
                    self._made_parents.insert(0, parent)
                self.partial.mkdir(exist_ok=True)
                # Locked before anything goes: another process may have looked as soon as this one.
                self._lock = hold(self.partial / MARKER, self.partial)
                self._created = True
                _empty(self.partial, keep_unfinished=keep_unfinished)
        except BaseException:
            if not self._created:
                with contextlib.suppress(OSError):
                    self.partial.rmdir()  # refused where somebody else has put something in
            self.discard()
            raise

    def sync(self) -> None:
        """Flushes the partial folder to the disk."""
        with disk_errors(self.partial):
            sync_tree(self.partial)

    def commit(self) -> None:
        """Flushes the partial folder to the disk and renames it to ``out``; an old output goes only then."""
        with disk_errors(self.out):
            self._check_out()  # again: the conversion may have taken hours
            _forget(self.partial)
            self.sync()  # again: files may have been added
            if _CLOSED_FIRST:
                self._unlock()
            if self.out.exists() and any(self.out.iterdir()):
                self._replace()
            else:
                if self.out.exists():
                    self.out.rmdir()  # refused, as it should be, once others put something in
                os.rename(self.partial, self.out)
            # Only now: without it, what is still called partial would be nobody's.
            with contextlib.suppress(OSError):
                (self.out / MARKER).unlink()
            self._created = False
            self._unlock()
            sync_folder(self.out.parent)

    def discard(self, *, keep_unfinished: bool = False) -> None:
        """Removes what `create` made and nothing else, also after an interruption half-way; nothing after a commit."""
        if _CLOSED_FIRST:
            self._unlock()
        # Errors are not worth hiding the one that led here: the marker lets the next run clear the rest.
        with contextlib.suppress(OSError):
            if self._created:
                _empty(self.partial, keep_unfinished=keep_unfinished)
                if not keep_unfinished:
                    shutil.rmtree(self.partial)
        self._unlock()
        with contextlib.suppress(OSError):
            for parent in self._made_parents:
                parent.rmdir()  # refused, as it should be, once others put something in

    def _check_out(self) -> None:
        if not os.path.lexists(self.out):
            return
        if not self.out.is_dir():
            raise SurgeryError(f"{self.out}: is a file; choose another --out")
        if not self._overwrite and any(self.out.iterdir()):
            raise SurgeryError(f"{self.out}: exists already; pass --overwrite or choose another --out")
        if not (self.out / CONFIG).is_file() and any(self.out.iterdir()):
            raise SurgeryError(
                f"{self.out}: holds other files than a checkpoint; it is not overwritten, choose another --out"
            )

    def _check_leftover(self) -> None:
        """Refuses a partial folder that somebody else made or is still writing."""
        if not os.path.lexists(self.partial):
            return
        if self.partial.is_symlink() or not self.partial.is_dir():
            raise SurgeryError(f"{self.partial}: is in the way and not ours; remove it or choose another --out")
        marker = self.partial / MARKER
        if not marker.is_file():
            # A run killed between making the folder and its marker leaves an empty one.
            if any(self.partial.iterdir()):
                raise SurgeryError(f"{self.partial}: is in the way and not ours; remove it or choose another --out")
            return
        hold(marker, self.partial).close()

    def _replace(self) -> None:
        """Swaps the old output for the new one; the old one is back where it was if that fails."""
        old = self.out.with_name(f"{self.out.name}{_REPLACED}{os.getpid()}")
        os.rename(self.out, old)
        try:
            os.rename(self.partial, self.out)
        finally:
            # Also where a signal came while the disk renamed: what has the name now decides.
            if self.out.exists():
                self._remove_replaced()
            else:
                os.rename(old, self.out)

    def _remove_replaced(self) -> None:
        """Removes outputs that were replaced, also those that a process left that was killed before it could."""
        for old in self.out.parent.glob(f"{glob.escape(self.out.name)}{_REPLACED}[0-9]*"):
            try:
                shutil.rmtree(old)
            except OSError as error:
                # The new output is good, so this is no failure of the run.
                warnings.warn(f"{old}: the replaced output could not be removed ({error}); remove it", stacklevel=2)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial") if out.name else out


def _forget(partial: Path) -> None:
    """Removes what a run goes on from. It loses its name at once: who is killed here leaves nobody a part of it."""
    forgotten = partial / _FORGOTTEN
    shutil.rmtree(forgotten, ignore_errors=True)
    if os.path.lexists(partial / UNFINISHED):
        os.rename(partial / UNFINISHED, forgotten)
    shutil.rmtree(forgotten, ignore_errors=True)


def _empty(partial: Path, *, keep_unfinished: bool) -> None:
    """Removes what a partial folder holds but its marker, so that an interrupted removal still leaves it marked."""
    if not keep_unfinished:
        _forget(partial)
    for path in partial.iterdir():
        if keep_unfinished and path.name == UNFINISHED:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
