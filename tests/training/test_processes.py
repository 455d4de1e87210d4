"""Several processes, and processes that die: the numbers of one that does not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from healing import heal_here, heal_settings, log_of, losses_of, same_results, settings_file
from processes import ROOT, Fork, two_forks
from safetensors.torch import load_file

HEAL = ["-m", "surgery.training.heal", "--config"]
KILLED_AT_STEP_9 = """
import os, runpy, signal
from surgery.training.run_log import RunLog

write = RunLog.write

def last_write(self, event, **values):
    write(self, event, **values)
    if values.get("step") == 9:
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.write = last_write
runpy.run_module("surgery.training.heal", run_name="__main__", alter_sys=True)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def settings(tmp_path, student, teacher):
    objective = {"kl": 1.0, "cross_entropy": 0.5, "hidden": 0.1, "attention": 0.1}
    return lambda **others: heal_settings(tmp_path, student, teacher, **{"objective": objective, **others})


def start(values: dict) -> subprocess.Popen:
    command = [sys.executable, *TORCHRUN, *HEAL, str(settings_file(values))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def finished(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def of_forks(values: dict) -> str:
    """What two processes said, each told what a launcher would tell it."""
    forks = two_forks("--config", settings_file(values), module="surgery.training.heal")
    return "".join(fork.stderr for fork in forks)


def of_torchrun(values: dict) -> str:
    code, errors = finished(start(values))
    assert code == 0, errors[-3000:]
    return errors


@pytest.mark.parametrize("launch", [of_forks, pytest.param(of_torchrun, marks=pytest.mark.slow)])
def test_two_processes_give_the_results_of_one(settings, launch):
    one, two = settings(name="one"), settings(name="two", gradient_accumulation=1)
    heal_here(one)
    assert launch(two).count("max_steps reached") == 1  # one of them speaks
    same_results(one, two)


def test_a_killed_run_goes_on_exactly(settings):
    slow = {"max_steps": 24, "save_every": 4, "eval_every": 10}
    whole, killed = settings(name="whole", **slow), settings(name="killed", **slow)
    process = Fork("--config", settings_file(killed), code=KILLED_AT_STEP_9)
    assert process.wait() == -signal.SIGKILL
    heal_here(whole)
    assert not Path(killed["out"]).exists()
    assert heal_here(killed)["steps"] == 24
    resumed = log_of(killed, "resume")
    assert len(resumed) == 1
    assert resumed[0]["step"] == 8
    assert losses_of(killed) == losses_of(whole)  # bit for bit
    ends = [load_file(Path(run["out"]) / "model.safetensors") for run in (whole, killed)]
    assert all(torch.equal(each, ends[1][name]) for name, each in ends[0].items())
