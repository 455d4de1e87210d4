"""`tools/gpu.py`: a rehearsal of every step, steps that are cut short, and the report."""

import json
import sys
import time
from pathlib import Path

import pytest
from processes import Fork
from project_tools import tool

from surgery.common.errors import SurgeryError

BY_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def gpu():
    return tool("gpu")


@pytest.fixture(scope="module")
def gpu_report(gpu):
    return sys.modules["gpu_report"]


class Forked(Fork):
    """A step that begins where torch is imported already."""

    def wait(self, seconds: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        return self.returncode


def fork(arguments: list[str], log: Path) -> Forked:
    return Forked(*arguments[2:], module=arguments[1]) if arguments[0] == "-m" else Forked(*arguments, code=BY_PATH)


def take(gpu, out: Path, **changes) -> dict:
    gpu.run(**{"seconds": 900.0, "out": out, "steps": None, "device": "cpu", "tiny": True, **changes})
    return json.loads((out / "run.json").read_text())


def test_rehearsal_every_step_leaves_rows_and_is_not_done_again(gpu, gpu_report, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "start", fork)
    record = take(gpu, tmp_path)
    assert {name: step["code"] for name, step in record["steps"].items()} == dict.fromkeys(record["steps"], 0)
    report = gpu_report.report_of(tmp_path)
    assert list(report["steps"]) == [step.name for step in gpu.STEPS]
    assert all(step["rows"] for step in report["steps"].values())
    assert {row["outcome"] for row in report["steps"]["tests"]["rows"]} == {"passed"}
    assert [row["gate"]["passed"] for row in report["steps"]["kernels"]["rows"]] == [True, True]
    for name, kinds in (("decode", {"mla", "gqa", "lowrank"}), ("decode-rows", {"mla-bits"})):
        rows = [row for row in report["steps"][name]["rows"] if row["tokens_per_second"] > 0]
        assert {row["kind"] for row in rows} == {"source", *kinds}
    for part in gpu_report.PARTS.values():
        assert "CPU" in part(report)
    with pytest.raises(SurgeryError, match="--tiny"):
        gpu_report.merge(tmp_path)
    monkeypatch.setattr(gpu, "run_step", None)
    assert take(gpu, tmp_path)["steps"] == record["steps"]


def test_a_step_past_its_limit_is_ended_and_its_rows_stay(gpu, gpu_report, tmp_path, monkeypatch):
    code = f"import time; open({str(tmp_path / 'rows.json')!r}, 'w').write('{{\"rows\": [1]}}'); time.sleep(60)"
    endless = sys.modules["gpu_steps"].Step("endless", 0.3, "rows.json", lambda setup, seconds: ["-S", "-c", code])
    for module in (gpu, gpu_report):
        monkeypatch.setattr(module, "STEPS", (endless,))
    (step,) = take(gpu, tmp_path)["steps"].values()
    assert step["cut"] and step["code"] != 0 and step["seconds"] < 20
    assert gpu_report.report_of(tmp_path)["steps"]["endless"]["rows"] == [1]


def test_no_step_begins_without_time_and_wrong_calls_are_refused(gpu, gpu_report, tmp_path):
    record = take(gpu, tmp_path, seconds=1.0)
    assert all("no time is left" in step["why"] for step in record["steps"].values())
    with pytest.raises(SurgeryError, match="has no rows"):
        gpu_report.merge(tmp_path)
    with pytest.raises(SurgeryError, match="--steps fly: unknown; choose from facts"):
        take(gpu, tmp_path, steps="facts,fly")
    with pytest.raises(SurgeryError, match="no such file"):
        gpu_report.merge(tmp_path / "absent")


def test_pages_are_made_from_the_newest_report(gpu_report):
    report = gpu_report.newest()
    for page in gpu_report.PAGES:
        text = (gpu_report.ROOT / page).read_text()
        assert gpu_report.MARK.search(text), page
        assert gpu_report.with_parts(text, report) == text, f"{page}: run python tools/gpu.py merge"
