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
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("may not mount")
    return done


@pytest.mark.parametrize(
    ("options", "out", "words"),
    [
        ("size=300k", "elsewhere", "temporary file"),
        ("size=3m", "small", "needs"),
        ("ro", "small", "Read-only file system"),
    ],
    ids=["statistics on a full disk", "an output that does not fit", "an output on a disk that is read only"],
)
def test_one_line_and_nothing_left(options, out, words, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    output = tmp_path / out / "out"
    temporary = f"TMPDIR={tmp_path} " if out == "small" else ""
    command = f"{temporary}{sys.executable} -m surgery convert builtin --calibration none --out {output}"
    done = in_small_disk(small, options, f"{command}; code=$?; ls -A {small} >&2; exit $code")
    assert done.returncode == 1 and words in done.stderr
    assert done.stderr.splitlines()[-1].startswith("surgery: error: ")  # nothing is listed behind it
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
