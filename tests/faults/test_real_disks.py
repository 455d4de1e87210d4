"""Disks that are full or cannot be written, as the system has them: small file systems in a mount namespace."""

import os
import shutil
import subprocess
import sys

import pytest
from command_line import ROOT

pytestmark = pytest.mark.slow


def in_small_disk(folder, options, command):
    """A shell command in which ``folder`` is a file system of its own."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    script = f"mount -t tmpfs -o {options} none {folder} && {command}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment)
    if "mount:" in process.stderr or "unshare:" in process.stderr:
        pytest.skip("may not mount")
    return process


QUICK = "--calibration-tokens 2048 --calibration-length 256 --held-out 2"


@pytest.mark.parametrize(
    ("options", "verb", "temporary", "words"),
    [
        ("size=300k", f"plan builtin --allow lowrank {QUICK}", "small", "free some or set TMPDIR"),
        ("size=300k", f"plan builtin --allow lowrank {QUICK} --out {{small}}/plan.yaml", "other", "another --out"),
        ("size=3m", "convert builtin --calibration none --out {small}/out", "other", "needs"),
        ("size=3m", "export builtin --engine llama.cpp --out {small}/m.gguf", "other", "no space left"),
        ("ro", "convert builtin --calibration none --out {small}/out", "other", "Read-only file system"),
        ("ro", "plan builtin --out {small}/plan.yaml", "other", "create the folder, or make it writable"),
        ("ro", "eval builtin --tasks loss --limit 1 --variants none --out {small}/r", "other", "Read-only file system"),
        ("ro", "heads builtin --method induction --out {small}/p.safetensors", "other", "Read-only file system"),
        ("ro", "heal builtin --teacher builtin --max-steps 1 --out {small}/h", "other", "Read-only file system"),
    ],
    ids=["statistics", "plan, full", "convert, full", "export, full", "convert", "plan", "eval", "heads", "heal"],
)
def test_one_line_and_nothing_left(options, verb, temporary, words, tmp_path):
    folders = {name: tmp_path / name for name in ("small", "other")}
    for folder in folders.values():
        folder.mkdir()
    command = f"TMPDIR={folders[temporary]} {sys.executable} -m surgery {verb.format(**folders)}"
    leftovers = f"ls -A {folders['small']} | grep -v torchinductor >&2"  # a cache of torch's own
    result = in_small_disk(folders["small"], options, f"{command}; code=$?; {leftovers}; exit $code")
    assert result.returncode == 1 and words in result.stderr
    assert result.stderr.splitlines()[-1].startswith("surgery: error: ")  # nothing is listed after it
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert not list(folders["other"].iterdir())
