"""An output folder that appears whole or not at all.

Everything is written to ``<out>.partial`` and renamed at the end. A ledger in it names every file before it is
written, so that clean-up removes nothing else, and carries a lock while a process is at work. A folder in it, which
never becomes part of the output, holds what an interrupted run resumes from.
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
    format_size,
    free_bytes,
    sync_folder,
    sync_tree,
    tree_bytes,
)
from surgery.common.errors import SurgeryError
from surgery.common.file_lock import hold
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
"""Files in the folder of unfinished work: what it was begun from, states of loops, one file a layer."""
_FORGOTTEN = ".surgery-forgotten"
_REPLACED, _REPLACED_MARKER = ".replaced-", ".surgery-replaced"
# For what is not planned to the byte: tokenizer, report, plots.
_SPARE_BYTES = 64 * 10**6
# Windows neither renames nor removes a folder with an open file in it, and has none of these locks.
_CLOSED_FIRST = os.name == "nt"


def check_output(source: Path, out: Path) -> None:
    """Refuses an output that would destroy the checkpoint it is made from.

    Raises:
        SurgeryError: ``out`` (or the ``.partial`` folder next to it) is the source, lies inside it or contains it.
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
        """Raises NoSpace where the disk has no room for ``needed`` bytes and some to spare."""
        with disk_errors(self.out):
            # A leftover goes before anything is written.
            free = free_bytes(self.out.parent) + tree_bytes(self.partial) - tree_bytes(self.partial / UNFINISHED)
        if needed + _SPARE_BYTES > free:
            raise NoSpace(
                f"{self.out}: needs {format_size(needed + _SPARE_BYTES)}, the disk has {format_size(free)} free;"
                " free some or choose another --out"
            )

    def claim(self, *names: str) -> None:
        """Announces files of the output, by their paths in it, before they are written."""
        with disk_errors(self.partial):
            self._ledger.claim_files(*names)

    def claim_like(self, folder: Path, *patterns: str) -> None:
        """Announces files with the names of those in a folder, and files that match patterns."""
        with disk_errors(self.partial):
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            self._ledger.claim_files(*names)
            self._ledger.claim(*patterns)

    def create(self, *, keep_unfinished: bool = False) -> None:
        """Makes the empty partial folder, in place of a leftover, of which one folder may stay, and missing parents.

        Raises:
            SurgeryError: the leftover holds a file that no run has written, or the disk refuses.
        """
        try:
            with disk_errors(self.partial):
                self._check_leftover()
                for parent in reversed([p for p in self.partial.parents if not p.exists()]):
                    parent.mkdir()
                    self._made_parents.insert(0, parent)
                self.partial.mkdir(exist_ok=True)
                # Locked before anything goes: another process may have looked as soon as this one.
                self._lock = hold(self.partial / MARKER, self.partial)
                self._refuse_foreign()
                self._created = True
                resumes_from(self.partial)
                self._empty(keep_unfinished=keep_unfinished)
                self._ledger.open(self._lock)
                self._ledger.claim(*(f"{folder}/{name}" for folder in (UNFINISHED, _FORGOTTEN) for name in WORK_FILES))
        except BaseException:
            if not self._created:
                with contextlib.suppress(OSError):
                    self.partial.rmdir()  # refused where somebody else has put something in
            self.discard(keep_unfinished=keep_unfinished)
            raise

    def sync(self) -> None:
        """Flushes the partial folder to the disk."""
        with disk_errors(self.partial):
            sync_tree(self.partial)

    def commit(self) -> None:
        """Flushes the partial folder to the disk and renames it to ``out``; an old output goes only then."""
        with disk_errors(self.out):
            self._check_out()  # again: the conversion may have taken hours
            self._forget()
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
            if self._created and self._empty(keep_unfinished=keep_unfinished):
                (self.partial / MARKER).unlink()
                self.partial.rmdir()
        self._unlock()
        with contextlib.suppress(OSError):
            for parent in self._made_parents:
                parent.rmdir()  # refused, as it should be, once others put something in

    def _check_out(self) -> None:
        check_out(self.out, overwrite=self._overwrite)

    def _check_leftover(self) -> None:
        """Refuses a partial folder that somebody else made, put a file in or is still writing."""
        if not os.path.lexists(self.partial):
            return
        if self.partial.is_symlink() or not self.partial.is_dir():
            raise SurgeryError.at(self.partial, "is in the way and not ours; remove it or choose another --out")
        marker = self.partial / MARKER
        if marker.is_symlink() or not marker.is_file():
            # A run killed between making the folder and its marker leaves an empty one.
            if any(self.partial.iterdir()):
                raise SurgeryError.at(self.partial, "is in the way and not ours; remove it or choose another --out")
            return
        hold(marker, self.partial).close()
        self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        foreign = first_foreign(self.partial, self._owned(MARKER))
        if foreign is not None:
            raise SurgeryError.at(
                self.partial,
                f"{foreign} is not in the list of what an unfinished run has written; move it away, or"
                " choose another --out",
            )

    def _owned(self, *more: str, besides: str = "") -> IsOwned:
        """Owns what runs have announced, and some names more; not what lies in a folder."""
        is_listed, is_more = self._ledger.owned(), matching(more)
        return lambda path: is_more(path) or (is_listed(path) and not (besides and path.startswith(f"{besides}/")))

    def _empty(self, *, keep_unfinished: bool) -> bool:
        """Removes what runs have put into the partial folder but the ledger, which lists what an interruption leaves.

        Returns:
            Whether nothing but the ledger is left.
        """
        if not keep_unfinished:
            self._forget()
        remove_owned(self.partial, self._owned(besides=UNFINISHED if keep_unfinished else ""))
        return [path.name for path in self.partial.iterdir()] == [MARKER]

    def _forget(self) -> None:
        """Removes what a run resumes from. It loses its name at once: who is killed here leaves nobody a part of it."""
        forgotten, is_owned = self.partial / _FORGOTTEN, matching(WORK_FILES)
        if os.path.lexists(forgotten):
            remove_owned(forgotten, is_owned)
        if os.path.lexists(self.partial / UNFINISHED):
            os.rename(self.partial / UNFINISHED, forgotten)
            remove_owned(forgotten, is_owned)

    def _replace(self) -> None:
        """Swaps the old output for the new one; the old one is back where it was if that fails."""
        old = self.out.with_name(f"{self.out.name}{_REPLACED}{os.getpid()}")
        while os.path.lexists(old):
            old = old.with_name(f"{old.name}0")
        os.rename(self.out, old)
        try:
            os.rename(self.partial, self.out)
        finally:
            # Also where a signal came while the disk renamed: what has the name now decides.
            if self.out.exists():
                (old / _REPLACED_MARKER).touch()
                self._remove_replaced()
            else:
                os.rename(old, self.out)

    def _remove_replaced(self) -> None:
        """Removes outputs that were replaced, also those that a process left that was killed before it could."""
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
                # The new output is good, so this is no failure of the run.
                warnings.warn(f"{old}: the replaced output could not be removed ({stays}); remove it", stacklevel=2)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._ledger.close()
            self._lock.close()
            self._lock = None


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuses an output folder that may not be made or replaced.

    Raises:
        SurgeryError: it is a file, is there and ``overwrite`` is not set, or holds what no run of this program wrote.
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
    """Owns what runs have put into a partial folder, and its ledger."""
    is_listed, is_marker = Ledger(partial / MARKER).owned(), matching([MARKER])
    return lambda path: is_listed(path) or is_marker(path)


def _partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial") if out.name else out
