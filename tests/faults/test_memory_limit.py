"""A conversion in a control group with too little memory: the kernel ends it, and it goes on to the same bits."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT
from conversions import results
from processes import AT_ONCE

from surgery.checkpoint.staging import MARKER, UNFINISHED

pytestmark = pytest.mark.slow

TEXT = ["--calibration-tokens", "131072", "--calibration-length", "256", "--held-out", "1", "--kv-ratio", "0.5"]
WIDE = ["--batch-size", "512"]  # of 512 sequences, whose activations under autograd take half a gigabyte
TOO_LITTLE = 640 * 2**20


@pytest.fixture
def limited(tmp_path):
    """Gives a folder of control groups below this process's own, whose processes have so much memory together."""
    # Lines are number:controllers:path, of the second version 0::path.
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    version_1 = "memory" in own
    parent = Path("/sys/fs/cgroup", "memory" if version_1 else "", own["memory" if version_1 else ""].strip("/"))
    group = parent / f"surgery-{os.getpid()}"
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if version_1 else ("memory.max", "memory.swap.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"may make no control group: {error}")
    try:
        with contextlib.suppress(FileNotFoundError):  # the second where swapping is not counted
            for name, count in zip(names, (TOO_LITTLE, TOO_LITTLE if version_1 else 0), strict=True):
                (group / name).write_text(str(count))
        if not (group / names[0]).exists():
            pytest.skip("control groups here limit no memory: their parent does not hand the controller on")
        yield group
    finally:
        group.rmdir()


def convert(source, out, group=None):
    command = [sys.executable, "-c", AT_ONCE, "convert", "--to", "lowrank", source, "--out", out, *TEXT, *WIDE]
    enter = f"echo $$ > {group}/cgroup.procs && " if group else ""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = ["sh", "-c", enter + 'exec "$@"', "sh", *map(str, command)]
    return subprocess.run(script, capture_output=True, text=True, env=environment)


def test_ended_by_the_kernel_and_run_again(checkpoints, tmp_path, limited):
    source, folder = checkpoints("llama"), tmp_path / "again"
    folder.mkdir()
    ended = convert(source, folder / "small", limited)
    if "cgroup.procs" in ended.stderr:
        pytest.skip(f"may not enter a control group: {ended.stderr.strip()}")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert os.listdir(folder) == ["small.partial"]
    assert set(os.listdir(folder / "small.partial")) == {MARKER, UNFINISHED}
    again = convert(source, folder / "small")
    assert again.returncode == 0 and "resuming from" in again.stderr, again.stderr
    assert os.listdir(folder) == ["small"]
    assert convert(source, tmp_path / "whole" / "small").returncode == 0
    assert results(folder / "small") == results(tmp_path / "whole" / "small")
