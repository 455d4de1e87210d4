"""SHA-256 of the files of a checkpoint, as it is wherever it was downloaded to: logs of a training are not part of it.

Nor is what people may edit, the card, and the report that holds the hashes.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.hub import is_downloaded
from surgery.common.progress import Progress

REPORT, CARD, SOURCE_CARD = "surgery_report.json", "README.md", "README.source.md"
_PIECE = 2**22
_THREADS = 4


def hash_files(folder: Path, progress: Progress | None = None) -> dict[str, str]:
    """By path in the folder, with slashes; hidden files and folders are left out.

    Raises:
        SurgeryError: a file cannot be read.
    """
    with disk_errors(folder):
        files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
        files = {
            name: path
            for name, path in files.items()
            if is_downloaded(name.as_posix())
            and name.as_posix() not in (REPORT, CARD, SOURCE_CARD)
            and not any(p.startswith(".") for p in name.parts)
        }
        total = sum(path.stat().st_size for path in files.values())
        progress = progress or Progress(silent=True)
        with progress.phase("hash the result", total, "B") as advance, ThreadPoolExecutor(_THREADS) as pool:
            found = {}
            for (name, path), digest in zip(files.items(), pool.map(hash_file, files.values()), strict=True):
                found[name.as_posix()] = digest
                advance(path.stat().st_size)
    return found


def hash_file(path: Path) -> str:
    """Of one file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
