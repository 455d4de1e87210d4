"""A conversion, its healings and its evaluations are filed together where they are followed."""

import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
from command_line import run_main
from tiny_models import HELD_OUT

from surgery.common.lineage import lineage_of
from surgery.evaluation.models import Checkpoint
from surgery.training.settings import HealSettings
from surgery.training.trackers import _wandb_options


@pytest.fixture
def runs(monkeypatch):
    """What a stand-in for wandb is given, a run each."""
    found = []

    def init(**given):
        run = SimpleNamespace(given=given, logged={}, summary={}, dir=f"{given['dir']}/run/files", url="address")
        run.log = run.logged.update
        found.append(run)
        return nullcontext(run)

    fake = ModuleType("wandb")
    fake.init, fake.Error, fake.Settings = init, type("Error", (Exception,), {}), dict
    fake.Table = lambda columns, data: {"columns": columns, "data": data}
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return found


def test_one_group(checkpoints, runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "small"
    text = ["--calibration", HELD_OUT, "--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "1"]
    verb = ["convert", checkpoints("llama"), "--to", "gqa", "--kv-heads", "1", "--fit-steps", "0", *text, "--out", out]
    code, _, error = run_main(monkeypatch, capsys, *verb, "--wandb", "p", "--wandb-mode", "offline")
    assert code == 0, error
    (run,) = runs
    group = lineage_of(out)
    assert re.fullmatch(r"mqa-[0-9a-f]{8}", group)  # what one KV head is called
    told = {name: run.given[name] for name in ("project", "name", "group", "job_type", "mode", "dir")}
    folder = str(tmp_path / "small.tracking")
    expected = ("p", "small", group, "convert", "offline", folder)
    assert told == dict(zip(told, expected, strict=True))
    assert run.summary["kv_ratio"] == 0.5 and run.summary["loss/change"] == pytest.approx(
        run.logged["ladder"]["data"][-1][1] - run.logged["ladder"]["data"][0][1]
    )
    assert [row[0] for row in run.logged["layers"]["data"]] == [0, 1]
    # What is measured and trained of it stands there too; what nobody converted, nowhere.
    assert Checkpoint.open(str(out)).conversion()["lineage"] == group
    settings = HealSettings(student=str(out), tracker="wandb", wandb_mode="offline")
    healing = _wandb_options(settings, tmp_path / "small-healed.tracking")
    assert (healing["group"], healing["name"]) == (group, "small-healed")
    assert lineage_of(checkpoints("llama")) is None


def test_a_wrong_mode_is_told_before_any_work(checkpoints, tmp_path, monkeypatch, capsys):
    verb = ["convert", checkpoints("llama"), "--out", tmp_path / "small", "--wandb", "p", "--wandb-mode", "of"]
    code, _, error = run_main(monkeypatch, capsys, *verb)
    assert code == 1 and "--wandb-mode of: choose online or offline" in error and not (tmp_path / "small").exists()
