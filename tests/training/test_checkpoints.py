"""Checkpoints are whole or not there, and bring back everything."""

import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from surgery.common.errors import SurgeryError
from surgery.training.checkpoints import STATE, WEIGHTS, Checkpoints, latest, read_state
from surgery.training.run_log import RunLog, drop_later_lines


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)


class Pair(torch.nn.Module):
    """A layer that trains and one that does not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.second.requires_grad_(False)

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


def prepared(accelerator, folder, seed=0, **settings):
    torch.manual_seed(seed)
    model = Pair()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, Checkpoints(folder, accelerator, **settings)


def step(accelerator, model, optimizer):
    # Of random inputs: without the random numbers' state a resumed run would go another way.
    accelerator.backward(model(torch.randn(4, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_only_what_trains_is_kept(accelerator, tmp_path):
    from safetensors.torch import load_file

    _, _, checkpoints = prepared(accelerator, tmp_path / "run")
    path = checkpoints.save({"step": 1})
    assert set(load_file(path / WEIGHTS)) == {"first.weight", "first.bias"}
    assert not list(path.glob("model*"))


def test_the_last_ones_are_kept_and_named_ones_too(accelerator, tmp_path):
    _, _, checkpoints = prepared(accelerator, tmp_path / "run", keep_last=2)
    checkpoints.save({"step": 1}, "best")
    for number in range(1, 5):
        path = checkpoints.save({"step": number})
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["best", "step-00000003", "step-00000004"]
    assert checkpoints.latest() == checkpoints.last_good == path


def test_damaged_ones_are_passed_over_with_a_note(accelerator, tmp_path):
    _, _, checkpoints = prepared(accelerator, tmp_path / "run", keep_last=9)
    paths = [checkpoints.save({"step": number}) for number in range(1, 5)]
    (paths[3] / WEIGHTS).write_bytes(b"half")
    (paths[2] / STATE).unlink()
    (paths[0] / STATE).write_text("{")
    notes = []
    assert latest(tmp_path / "run", notes.append) == paths[1]
    assert len(notes) == 2
    assert all("damaged" in note for note in notes)
    for path in (paths[0], paths[2], paths[3], tmp_path / "none"):
        assert read_state(path) is None
        with pytest.raises(SurgeryError, match="damaged"):
            checkpoints.load(path)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), SurgeryError)],
)
def test_an_interrupted_write_leaves_the_last_one(accelerator, tmp_path, monkeypatch, error, expected):
    _, _, checkpoints = prepared(accelerator, tmp_path / "run")
    path = checkpoints.save({"step": 1})

    def failing(*arguments):
        raise error

    monkeypatch.setattr("surgery.training.checkpoints.sync_tree", failing)
    with pytest.raises(expected, match=r"no space left|^$"):
        checkpoints.save({"step": 2})
    monkeypatch.undo()
    assert checkpoints.latest() == path
    checkpoints.save({"step": 2})  # over what was left
    assert checkpoints.latest().name == "step-00000002"


def test_other_parameters_are_refused(accelerator, tmp_path):
    _, _, checkpoints = prepared(accelerator, tmp_path / "run")
    path = checkpoints.save({"step": 1})
    AcceleratorState._reset_state(True)
    other = Accelerator(cpu=True)
    model, _, checkpoints = prepared(other, tmp_path / "run")
    model.first.bias.requires_grad_(False)
    with pytest.raises(SurgeryError, match="trained parameters differ"):
        checkpoints.load(path)


def test_the_log_of_a_resumed_run_has_every_step_once_of_one_process(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RunLog(path, writes=True)
    for number in range(1, 5):
        log.write("step", step=number, loss=float("nan") if number == 1 else 0.5)
    log.close()
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    drop_later_lines(path, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == "nan"  # JSON has no other word for it
    RunLog(tmp_path / "other.jsonl", writes=False).write("step", step=1)
    assert not (tmp_path / "other.jsonl").exists()
