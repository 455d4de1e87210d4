"""OpenMP's threads sleep while they wait, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest
from command_line import ROOT

# What each command's process has set by the time that torch could be loaded.
PROBE = """
import os, runpy, sys
sys.argv = ["-m", "--version"]
try:
    runpy.run_module("surgery", run_name="__main__", alter_sys=False)
except SystemExit:
    pass
assert "torch" not in sys.modules
print(os.environ["OMP_WAIT_POLICY"])
"""


def run(*command, **environment) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    process = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


@pytest.mark.parametrize(("settings", "result"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_the_command_line_sets_the_policy_before_torch(settings, result):
    assert run("-c", PROBE, **settings) == result


@pytest.mark.slow
def test_a_launched_training_sets_it(tmp_path):
    probe = tmp_path / "sitecustomize.py"
    probe.write_text(
        "import atexit, os\natexit.register(lambda: print(os.environ.get('OMP_WAIT_POLICY'), flush=True))\n"
    )
    result = run("-m", "surgery.training.heal", "--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert result == "PASSIVE"
