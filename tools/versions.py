"""Test the package at both ends of its declared versions: Python, and the oldest and newest dependencies.

    python tools/versions.py                  # every pair below, one after the other; writes docs/versions.md
    python tools/versions.py 3.10:floor       # selected pairs; other rows stay unchanged

Each pair gets a new environment, in which uv (if installed, since it is faster) or pip installs the wheel: for `floor`
with a constraint for every lower bound of pyproject.toml, for `newest` with the newest compatible releases. Then every
module is imported and a subset of the tests runs on the installed package. An environment takes up to 7 GB on disk
during its test.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from release import ROOT, build, environment

FLOOR, NEWEST = "floor", "newest"
PAIRS = ("3.10:floor", "3.11:floor", "3.10:newest", "3.11:newest", "3.12:newest", "3.13:newest")
EXTRAS = {FLOOR: "train,eval,gguf", NEWEST: "train,eval,gguf,kernels"}
"""Extras by end; no kernels at the floor, since torch pins Triton and that of the oldest torch is too old."""
TESTS_NEED = ("pytest", "pytest-xdist", "hypothesis")
ALSO = {FLOOR: (), NEWEST: ("compressed-tensors; python_version >= '3.11'",)}
"""Packages that enable further tests; they need a newer torch than the floor's."""

TESTS = (
    *("tests/test_cli.py", "tests/test_convert.py", "tests/test_convert_low_rank.py", "tests/test_convert_heads.py"),
    *("tests/test_convert_hybrid.py", "tests/test_convert_cross_layer.py"),
    *("tests/test_slicing.py", "tests/test_tokenizer_class.py", "tests/test_old_checkpoints.py"),
    *("tests/test_python_api.py", "tests/test_heal.py"),
    *("tests/checkpoint/test_quantized.py", "tests/checkpoint/test_kept_quantized.py", "tests/checkpoint/test_gguf.py"),
)
SHOWN = ("torch", "transformers", "huggingface_hub", "safetensors", "numpy", "accelerate", "peft", "datasets")
IMPORTS = """
import importlib, pathlib, surgery
root, absent, done = pathlib.Path(surgery.__file__).parent, set(), 0
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    if parts[-1] == "__main__" or parts[1:] == ("demo", "measure"):  # scripts
        continue
    try:
        importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        done += 1
    except ModuleNotFoundError as error:
        if (error.name or "surgery").split(".")[0] == "surgery":
            raise
        absent.add(error.name)
print(done, *sorted(absent))
"""
VERSIONS = (
    "import importlib.metadata as m, platform, sys; print(platform.python_version(), *map(m.version, sys.argv[1:]))"
)
PAGE = ROOT / "docs" / "versions.md"
INTRODUCTION = f"""# Versions

The package is tested at both ends of the versions that `pyproject.toml` declares. `floor` installs the lower bound of
every requirement, `newest` the newest compatible releases. Each environment imports all modules of the installed
wheel and runs {len(TESTS)} test files. They cover the command line, conversions to every target, reloading, slices,
earlier checkpoints, evaluation, healing and quantized sources. `python tools/versions.py` writes this page, on x86-64
Linux without a GPU.

| Python | end | {" | ".join(SHOWN)} | modules imported | tests passed | failed | skipped | date |
|---|---|{"---|" * len(SHOWN)}---:|---:|---:|---:|---|
"""
REMARKS = """
The floor does not install the `kernels` extra: each torch pins a Triton version, and that of the oldest torch is too
old. On Python 3.10 the newest torch and transformers that can be installed are older releases.
"""


def floors(wheel: Path) -> list[str]:
    """Return a pip constraint for every lower bound in a wheel's metadata, except those of the kernels extra.

    Raises SystemExit: a package with two different lower bounds.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        stated = archive.read(name).decode()
    versions: dict[str, str] = {}
    bounds = re.findall(r"^Requires-Dist: ([\w.-]+)(?:\[.*?\])?>=([\w.]+)(?!.*kernels)", stated, re.MULTILINE)
    for package, bound in bounds:
        if versions.setdefault(package, bound) != bound:
            sys.exit(
                f"versions: pyproject.toml has two lower bounds of {package}, {versions[package]} and {bound}; use one"
            )
    return [f"{package}=={bound}" for package, bound in versions.items()]


def interpreter(minor: str) -> str:
    """Return the interpreter of a Python version such as 3.10, from PATH or pyenv's folder.

    Raises SystemExit: not installed.
    """
    for path in (
        shutil.which(f"python{minor}"),
        *glob.glob(os.path.expanduser(f"~/.pyenv/versions/{minor}.*/bin/python")),
    ):
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if path and subprocess.run(command, capture_output=True, text=True).stdout.strip() == minor:
            return path
    sys.exit(f"versions: Python {minor} is not installed")


def try_pair(minor: str, end: str, wheel: Path, folder: Path) -> tuple[str, bool]:
    """Install a wheel into a new environment, import its modules and run the tests.

    Returns the row of the table, and whether all tests passed.
    """
    python, report = folder / "venv" / "bin" / "python", folder / "tests.xml"
    _run(interpreter(minor), "-m", "venv", folder / "venv")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(floors(wheel)) if end == FLOOR else "")
    uv = shutil.which("uv")
    install = (uv, "pip", "install", "-p", python) if uv else (python, "-m", "pip", "install")
    _run(*install, "-q", "-c", constraints, f"{wheel}[{EXTRAS[end]}]", *TESTS_NEED, *ALSO[end])
    versions = _run(python, "-c", VERSIONS, *SHOWN).split()
    modules, *absent = _run(python, "-c", IMPORTS).split()
    print(f"{minor} {end}: {modules} modules imported; not here: {', '.join(absent) or 'none'}", flush=True)
    # The console script, since `python -m pytest` would import the repository's code instead of the wheel's.
    pytest = [folder / "venv" / "bin" / "pytest", "-n", "0", "-q", f"--junitxml={report}", *TESTS]
    process = subprocess.run([str(each) for each in pytest], cwd=ROOT, env=environment())
    suite = ElementTree.parse(report).getroot()[0].attrib
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    counts = (modules, int(suite["tests"]) - failed - skipped, failed, skipped, date.today().isoformat())
    return f"| {' | '.join(map(str, (versions[0], end, *versions[1:], *counts)))} |", not process.returncode


def written(rows: dict[str, str]) -> str:
    """Return the page with these rows by pair, and its existing rows of other pairs."""
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    table = {
        f"{match[1]}:{match[2]}": line for line in old if (match := re.match(r"\| (3\.\d+)\.\d+ \| (\w+) \|", line))
    }
    table |= rows
    return INTRODUCTION + "".join(f"{table[pair]}\n" for pair in PAIRS if pair in table) + REMARKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", choices=[[], *PAIRS], metavar="PYTHON:END", help=", ".join(PAIRS))
    pairs = parser.parse_args().pairs or PAIRS
    passed = True
    with TemporaryDirectory() as folder:
        wheel = build(ROOT, Path(folder))[1]
        for pair in pairs:
            with TemporaryDirectory(dir=folder) as own:
                row, good = try_pair(*pair.split(":"), wheel, Path(own))
            PAGE.write_text(written({pair: row}), encoding="utf-8")
            print(row, flush=True)
            passed &= good
    sys.exit(0 if passed else "versions: not all passed")


def _run(*command: object) -> str:
    process = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, env=environment(), cwd="/"
    )
    if process.returncode:
        sys.exit(f"versions: {' '.join(map(str, command[:4]))} failed: {_last_lines(process)}")
    return process.stdout


def _last_lines(process: subprocess.CompletedProcess) -> str:
    """Return the last 30 lines of a command's output, without warnings."""
    lines = (process.stdout + process.stderr).splitlines()
    return "\n".join([line for line in lines if not line.startswith("WARNING")][-30:])


if __name__ == "__main__":
    main()
