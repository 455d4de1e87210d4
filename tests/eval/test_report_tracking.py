import copy
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from sample_report import sample_report

from surgery.common.errors import SurgeryError
from surgery.eval.report.figures import PLOTS
from surgery.eval.report.tracking import log_to_wandb

PICTURE = bytes.fromhex("89504e470d0a1a0a")


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.logged, self.summary = arguments, {}, {}
        self.offline = arguments["mode"] == "offline"
        self.dir, self.url, self.finished = f"{arguments['dir']}/run/files", "https://wandb.example/run", False

    def log(self, values):
        self.logged |= values

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.finished = True


@pytest.fixture(scope="module")
def fake():
    """A stand-in that keeps what it is given; `fake.runs` are the runs."""
    fake = ModuleType("wandb")
    fake.runs = []

    def init(**arguments):
        assert all(run.finished for run in fake.runs), "one run at a time"
        fake.runs.append(FakeRun(**arguments))
        return fake.runs[-1]

    fake.init = init
    fake.Error = type("Error", (Exception,), {})
    fake.Settings = lambda **settings: settings
    fake.Image = lambda path: Path(path).read_bytes()  # as wandb does, before the file may go away
    return fake


@pytest.fixture
def wandb(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture(scope="module")
def report():
    """The baseline, a converted checkpoint and a healed one."""
    whole = sample_report()
    return {**whole, "rows": [whole["rows"][index] for index in (0, 6, 7)]}


def log(report, folder, **others):
    return log_to_wandb(report, **({"project": "p", "mode": "offline", "folder": folder} | others))


@pytest.fixture(scope="module")
def logged(fake, report, tmp_path_factory):
    """The runs of the report, whose folder did not exist before."""
    folder = tmp_path_factory.mktemp("wandb") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", fake)
        assert log(report, folder) == [str(folder / "run")] * 3
    return list(fake.runs)


def test_a_finished_run_a_row(logged, wandb, report, tmp_path, monkeypatch):
    assert [run.arguments["name"] for run in logged] == [row["name"] for row in report["rows"]]
    for run in logged:
        inputs = run.arguments
        assert run.finished and (inputs["project"], inputs["mode"], inputs["job_type"]) == ("p", "offline", "eval")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert log({"rows": [{"name": "x"}]}, tmp_path, mode="online") == ["https://wandb.example/run"]
    assert wandb.runs[-1].arguments["mode"] is None  # online, or as WANDB_MODE says


def test_what_a_run_holds(logged, report):
    row, run = report["rows"][1], logged[1]
    plots = logged[0].logged
    assert set(plots) == {f"plots/{key}" for key in PLOTS} and all(each.startswith(PICTURE) for each in plots.values())
    assert not run.logged
    results, config = row["results"], run.arguments["config"]
    assert config["settings"] == report["settings"] and config["tasks"] == report["tasks"]
    assert config["environment"] == report["environment"] and config["sha256"] == row["sha256"]
    assert config["conversion"]["command"] == row["conversion"]["command"] and "layers" not in config["conversion"]
    json.dumps(config)
    assert run.summary["loss"] == results["loss"]["loss"]
    assert run.summary["loss_change"] == row["comparison"]["loss"]["difference"]
    assert run.summary["loss_change/low"] == row["comparison"]["loss"]["low"]
    assert run.summary["recall/change"] == row["comparison"]["recall"]["difference"]
    assert run.summary["loss/by_source/selectors/loss"] == results["loss"]["by_source"]["selectors"]["loss"]
    assert None not in run.summary.values() and "name" not in run.summary
    assert run.summary["lm-eval:python_names/metrics/acc/stderr"] == 0.049


def test_a_row_stands_with_its_conversion_and_names_the_run_that_healed_it(wandb, report, tmp_path):
    def grouped(*lineages):
        rows = [{**copy.deepcopy(row), "results": {}} for row in (*report["rows"], report["rows"][2])]
        for row, lineage in zip(rows[2:], lineages, strict=False):
            row["conversion"]["lineage"] = lineage
        wandb.runs.clear()
        log({**report, "rows": rows[: 2 + len(lineages)]}, tmp_path)
        return [run.arguments["group"] for run in wandb.runs]

    assert grouped("mla-1234") == ["mla-1234"] * 3
    assert wandb.runs[2].arguments["config"]["healing_run"] == "lab/healing/abc123"
    assert "healing_run" not in wandb.runs[1].arguments["config"]
    assert grouped("mla-1234", "gqa-1234") == [report["title"]] * 2 + ["mla-1234", "gqa-1234"]


def test_refusals(wandb, tmp_path, monkeypatch):
    report = {"rows": [{"name": "x"}]}
    (tmp_path / "file").touch()
    with pytest.raises(SurgeryError, match="file"):
        log(report, tmp_path / "file")

    def refuse(**arguments):
        raise wandb.Error("no API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(SurgeryError, match=r"no API key configured.*wandb login"):
        log(report, tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SurgeryError, match="pip install wandb"):
        log(report, tmp_path)


def _once_it_holds(file: Path, expected: bytes) -> bytes:
    """The file's content; wandb's own process writes it, on a busy machine a little later."""
    for _ in range(300):
        if expected in (files := file.read_bytes()):
            return files
        time.sleep(0.1)
    raise AssertionError(f"{expected!r} is not in {file.name} after half a minute")


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_the_real_thing_offline(tmp_path, monkeypatch, mode):
    pytest.importorskip("wandb").teardown()
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    report = sample_report(rows=2)
    for row in report["rows"]:
        row["results"] = {name: row["results"][name] for name in ("loss", "needle")}
    result = log(report, tmp_path, mode=mode)
    assert len(set(result)) == 2
    for number, (folder, row) in enumerate(zip(map(Path, result), report["rows"], strict=True)):
        assert folder.is_relative_to(tmp_path)
        assert {path.suffix for path in (folder / "files" / "media").rglob("*.*")} == (set() if number else {".png"})
        (file,) = folder.glob("*.wandb")
        files = _once_it_holds(file, row["name"].encode())
        assert repr(row["results"]["loss"]["loss"]).encode() in files
