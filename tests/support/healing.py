"""Healings of tiny models: settings for one, and what its log says."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from surgery.training import loop
from surgery.training.heal import heal
from surgery.training.settings import HealSettings

TEXT = "".join(f"def f{n}(x):\n    return x * {n} + {n * n % 7}\n\n" for n in range(1500))


def heal_settings(folder: Path, student: Path, teacher: Path | None, name: str = "healed", **others) -> dict:
    """Settings of a short run on a text file in `folder`, whose result goes to `folder/name`."""
    (folder / "text.txt").write_text(TEXT)
    return {
        "student": str(student),
        "teacher": None if teacher is None else str(teacher),
        "out": str(folder / name),
        "data": [str(folder / "text.txt")],
        "recall": 0.0,
        "length": 32,
        "held_out": 3,
        "batch_size": 2,
        "gradient_accumulation": 2,
        "learning_rate": 1e-3,
        "max_tokens": None,
        "max_steps": 6,
        "eval_every": 3,
        "save_every": 2,
        "save_seconds": None,
        "device": "cpu",
        **others,
    }


def heal_here(values: dict) -> dict:
    """A healing in this process; gives what heal.json says."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        return heal(HealSettings(**values))
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@contextmanager
def stopped_after(step: int) -> Iterator[None]:
    """A healing within it is told to end, as by a scheduler, when it has reported that step."""
    report = loop.Loop._report

    def report_and_stop(self, *arguments):
        report(self, *arguments)
        if self.at.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_report", report_and_stop)
        yield


def trained_here(command: list[str], environment: dict[str, str]) -> int:
    """Run the training of one process in this one, in place of `run_interruptible`."""
    assert command[:4] == [sys.executable, "-m", "surgery.training.heal", "--config"], command
    heal_here(vars(HealSettings.from_file(command[4])))
    return 0


def settings_file(values: dict) -> Path:
    """Write the settings for a process of its own."""
    path = Path(f"{values['out']}.yaml")
    path.write_text(yaml.safe_dump(values))
    return path


def log_of(values: dict, event: str = "step", finished: bool = True) -> list[dict]:
    """Lines of a run's log, of one kind."""
    out = Path(values["out"])
    path = out / "heal.jsonl" if finished else Path(f"{out}.run") / "heal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["event"] == event]


def losses_of(values: dict) -> list[float]:
    """The loss of every step of a finished run."""
    return [line["loss"] for line in log_of(values)]


def same_results(one: dict, two: dict) -> None:
    """Assert that two runs are one but for the rounding of sums in another order."""
    torch.testing.assert_close(losses_of(two), losses_of(one), rtol=1e-5, atol=0)
    for kind in ("gradient_norm", "kl", "cross_entropy", "hidden"):
        values = [[line[kind] for line in log_of(run)] for run in (one, two)]
        torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-7)
    held_out = [{line["step"]: line["cross_entropy"] for line in log_of(run, "held_out")} for run in (one, two)]
    for step, value in held_out[0].items():
        torch.testing.assert_close(held_out[1][step], value, rtol=1e-5, atol=0)
    tensors = [load_file(Path(run["out"]) / "model.safetensors") for run in (one, two)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, each in tensors[0].items():
        # Adam makes a full step of a gradient that is rounding alone.
        torch.testing.assert_close(tensors[1][name], each, rtol=1e-3, atol=2e-4)


def sharded_as_one(
    folder: Path, student: Path, teacher: Path, launch: Callable[[dict], CompletedProcess], alone: dict, **others
) -> None:
    """Assert that a run which `launch` shards over two processes, resumed on its way, has the results of one process.

    `others` are settings of both, `alone` those of the sharded run.
    """
    # A budget that grows would bend a schedule that ends with it.
    others |= {"schedule": "constant", "warmup": 0}
    others |= {"objective": {"kl": 1.0, "cross_entropy": 0.5, "hidden": 0.1}}
    one = heal_settings(folder, student, teacher, name="one", **others)
    two = heal_settings(folder, student, teacher, name="two", **others, **alone, gradient_accumulation=1)
    for steps in (4, 6):
        process = launch({**two, "max_steps": steps, "overwrite": True})
        assert process.returncode == 0, process.stderr[-3000:]
    heal_here(one)
    assert log_of(two, "resume")[0]["step"] == 4
    same_results(one, two)
