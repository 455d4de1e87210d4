"""Several processes, and processes that die: the numbers of one that does not."""

import signal
from pathlib import Path

import pytest
import torch
from healing import heal_here, heal_settings, log_of, losses_of, same_results, settings_file
from processes import Fork, two_forks
from safetensors.torch import load_file

KILLED_AT_STEP_3 = """
import os, runpy, signal
from surgery.training.run_log import RunLog

write = RunLog.write

def last_write(self, event, **values):
    write(self, event, **values)
    if values.get("step") == 3:
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.write = last_write
runpy.run_module("surgery.training.heal", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def settings(tmp_path, student, teacher):
    objective = {"kl": 1.0, "cross_entropy": 0.5, "hidden": 0.1}
    return lambda **others: heal_settings(tmp_path, student, teacher, **{"objective": objective, **others})


def test_two_processes_give_the_results_of_one(settings):
    one, two = settings(name="one"), settings(name="two", gradient_accumulation=1)
    heal_here(one)
    forks = two_forks("--config", settings_file(two), module="surgery.training.heal")
    assert "".join(fork.stderr for fork in forks).count("max_steps reached") == 1  # one of them speaks
    same_results(one, two)


def test_a_killed_run_goes_on_exactly(settings):
    slow = {"max_steps": 6, "save_every": 2, "eval_every": 4}
    whole, killed = settings(name="whole", **slow), settings(name="killed", **slow)
    process = Fork("--config", settings_file(killed), code=KILLED_AT_STEP_3)
    assert process.wait() == -signal.SIGKILL
    heal_here(whole)
    assert not Path(killed["out"]).exists()
    assert heal_here(killed)["steps"] == 6
    resumed = log_of(killed, "resume")
    assert len(resumed) == 1
    assert resumed[0]["step"] == 2
    assert losses_of(killed) == losses_of(whole)  # bit for bit
    ends = [load_file(Path(run["out"]) / "model.safetensors") for run in (whole, killed)]
    assert all(torch.equal(each, ends[1][name]) for name, each in ends[0].items())
