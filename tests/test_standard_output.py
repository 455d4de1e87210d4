"""Standard output that is closed, full, or read no further; and a working folder that was deleted."""

import os
import subprocess
import sys

import pytest
from command_line import LAUNCH, ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
COMMANDS = {"page": "run", "JSON": "run --json", "text": "config mla", "help": "--help"}


def shell(line, **options):
    """A line of sh in which `surgery` is the program."""
    line = line.replace("surgery", f'"{sys.executable}" -c "{LAUNCH}"', 1)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=ENVIRONMENT, **options)


@pytest.mark.parametrize("command", ["run", "run --json", "config mla"])
def test_nobody_reads(command):
    """A reader that leaves at once."""
    process = shell(f"set -o pipefail; surgery {command} | true")
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("stream", ["1", "2", "0"])
def test_closed_streams(stream):
    process = shell(f"surgery run --json {stream}>&-")
    assert process.returncode == 0 and "Traceback" not in process.stderr
    assert (process.stdout == "") == (stream == "1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk(command):
    process = shell(f"surgery {command} > /dev/full")
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert (
        process.stderr.startswith("surgery: error: standard output: no space left") and process.stderr.count("\n") == 1
    )


def test_a_deleted_working_folder(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    process = shell(f"rmdir {folder}; surgery inspect ckpt", cwd=folder)
    assert process.returncode == 1 and process.stderr.startswith("surgery: error: the working folder")
    assert process.stderr.count("\n") == 1
