"""SHA-256 of a checkpoint's files, except model cards, which users may edit, and the report with the hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.file_kinds import CARD, REPORT, SOURCE_CARD, list_files
from surgery.common.progress import Progress

UNHASHED = (REPORT, CARD, SOURCE_CARD)
_PIECE = 2**22
_THREADS = 4


def hash_files(folder: Path, progress: Progress | None = None, names: Iterable[str] | None = None) -> dict[str, str]:
    """Hash the files of a folder; returns hex digests by relative path, with slashes.

    Args:
        names: files to hash; None for all except hidden files, links to folders and `UNHASHED`.

    Raises:
        SurgeryError: a file cannot be read.
    """
    with disk_errors(folder):
        if names is None:
            names = [name for name in list_files(folder) if name not in UNHASHED and not name.endswith("/")]
        sizes = {name: (folder / name).stat().st_size for name in names}
        progress = progress or Progress(silent=True)
        with (
            progress.phase("hash the result", sum(sizes.values()), "B") as advance,
            ThreadPoolExecutor(_THREADS) as pool,
        ):
            digests = {}
            for name, digest in zip(sizes, pool.map(lambda name: hash_file(folder / name), sizes), strict=True):
                digests[name] = digest
                advance(sizes[name])
    return digests


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
