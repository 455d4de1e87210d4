"""Every long command, ended by SIGKILL at random moments and begun again each time, ends as one that nobody killed.

pytest -n 0 -m slow tests/test_killed.py
"""

import hashlib
import json
import os
import random
import shutil
import signal
import time

import pytest
import yaml
from conversions import results
from processes import AT_ONCE, Fork
from tiny_models import HELD_OUT

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("SURGERY_KILLS", "50"))
# All that a command starts is in its process group; the training of a healing is a fork, as torch takes long to import.
ALONE = (
    """
import os, runpy, sys
os.setpgrp()
from surgery.healing import heal

def forked(command, environment):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ.update(environment)
    sys.argv[:] = command[2:]
    code = 1
    try:
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    finally:
        os._exit(code)

heal.run_interruptible = forked
"""
    + AT_ONCE
)
TEXT = ("--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "2")
LOSS = {"tasks": ["loss", "recall"], "length": 64, "windows": 4, "variants": "none"}


def of_evaluation(out):
    rows = json.loads((out / "report.json").read_text())["rows"]
    return [[row["name"], row["kv"], row["results"], row["comparison"]] for row in rows]


def of_healing(out):
    steps = [json.loads(line) for line in (out / "heal.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in steps if line["event"] == "step"]
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(), losses


def of_plan(out):
    """But for the first line, which names the file."""
    return out.read_text().split("\n", 1)[1]


def of_recipe(out):
    return results(out / "half"), of_evaluation(out / "report")


CONVERT = ("convert", "{source}", "--to", "lowrank", "--kv-ratio", "0.5", *TEXT)
EVAL = ("eval", "{source}", "--tasks", "loss,recall", "--length", "64", "--windows", "4", "--variants", "none")
PLAN = ("plan", "{source}", "--kv-ratio", "0.5", "--allow", "lowrank,quantized", "--recall", "0", "--context", "256")
VERBS = {
    "convert": ("out", results, CONVERT),
    "heal": ("out", of_healing, ("heal", "{source}", "--teacher", "{source}", "--config", "{heal}", "--no-measure")),
    "eval": ("out", of_evaluation, EVAL),
    "plan": ("out.yaml", of_plan, (*PLAN, *TEXT)),
    "run": ("out", of_recipe, ("run", "{recipe}")),
}
GO_ON = ("eval", "run")
"""Verbs that are asked again where their output is, and find that all is done; the others would replace it."""


@pytest.fixture
def paths(checkpoints, tmp_path):
    """Return the paths that commands take, but for the output."""
    source, heal, recipe = checkpoints("llama"), tmp_path / "heal.yaml", tmp_path / "recipe.yaml"
    training = {"data": [str(HELD_OUT)], "length": 32, "held_out": 2, "max_steps": 12, "batch_size": 1}
    training |= {"max_tokens": None, "gradient_accumulation": 1, "save_every": 2, "eval_every": 6, "recall": 0.0}
    heal.write_text(yaml.safe_dump(training))
    convert = {"name": "half", "source": str(source), "to": "lowrank", "kv_ratio": 0.5, "held_out": 2}
    convert |= {"calibration_tokens": 256, "calibration_length": 64}
    measure = {"name": "report", "baseline": str(source), "checkpoints": ["half"], **LOSS}
    recipe.write_text(yaml.safe_dump({"steps": [{"convert": convert}, {"eval": measure}]}))
    return {"source": source, "heal": heal, "recipe": recipe}


def ended_at_once(process):
    """Kills all that a fork started, and gives whether it was the one that ended it."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # so young that it has no group yet
            os.kill(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_random(verb, paths, tmp_path):
    name, content, command = VERBS[verb]
    command = [part.format(**paths) for part in command]
    whole, again = tmp_path / "whole", tmp_path / "again"
    whole.mkdir(), again.mkdir()
    option = "--work" if verb == "run" else "--out"
    Fork(code="").wait()  # what forks are of has to begin first, and is not in the length
    began = time.monotonic()
    process = Fork(*command, option, whole / name, code=ALONE)
    assert process.wait() == 0, process.stderr[-3000:]
    length, drawn, killed = time.monotonic() - began, random.Random(0), 0
    expected, leftovers = content(whole / name), sorted(os.listdir(whole))
    while killed < KILLS:
        process = Fork(*command, option, again / name, code=ALONE)
        time.sleep(drawn.uniform(0, length))
        stopped = ended_at_once(process)
        killed += stopped
        assert stopped or process.returncode == 0, process.stderr[-3000:]
        if not stopped or (verb not in GO_ON and (again / name).exists()):  # it resumed from so late that it was done
            assert content(again / name) == expected
            shutil.rmtree(again)
            again.mkdir()
    process = Fork(*command, option, again / name, code=ALONE)
    assert process.wait() == 0, process.stderr[-3000:]
    assert content(again / name) == expected
    assert sorted(os.listdir(again)) == leftovers
