"""`tools/gpu.py`: a rehearsal of every step, runs that are cut short, parts of a pack, and the report."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run_main
from healing import trained_here
from processes import Fork
from project_tools import tool

from surgery.bench.models import converted_configs
from surgery.common.errors import SurgeryError
from surgery.healing import heal as healing

BY_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def gpu_run():
    tool("gpu")
    return sys.modules["gpu_run"]


@pytest.fixture(scope="module")
def gpu_report(gpu_run):
    return sys.modules["gpu_report"]


class Forked(Fork):
    """A step that begins where torch is imported already."""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def fork(arguments: list[str], environment: dict[str, str], log: Path) -> Any:
    """Fork instead of `gpu_run.start`, which is slower, but for a step that compiles: forks have a Triton that
    interprets."""
    if environment.get("TRITON_INTERPRET") == "0":
        return sys.modules["gpu_run"].start(arguments, environment, log)
    path = tuple(map(Path, environment["PYTHONPATH"].split(os.pathsep)))
    if arguments[0] == "-m":
        return Forked(*arguments[2:], module=arguments[1], environment=environment, path=path)
    return Forked(*arguments, code=BY_PATH, environment=environment, path=path)


@pytest.fixture
def start_here(monkeypatch, capsys):
    """Run commands of `surgery` in this process, which has imported what they need, and begin other steps as forks."""
    monkeypatch.setattr(healing, "run_interruptible", trained_here)

    def start(arguments: list[str], environment: dict[str, str], log: Path) -> Any:
        if arguments[:2] != ["-m", "surgery"]:
            return fork(arguments, environment, log)
        code, out, err = run_main(monkeypatch, capsys, *arguments[2:])
        with log.open("a") as file:
            file.write(out + err)
        return SimpleNamespace(poll=lambda: code)

    return start


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def take(gpu_run, tmp_path: Path, **changes) -> list[dict]:
    options = {"seconds": 900.0, "max_files": 8, "pack": tmp_path / "pack", "work": tmp_path / "work", "steps": None}
    options |= {"device": "cpu", "tiny": True, "out": tmp_path / "out", "starter": fork}
    gpu_run.run(**{**options, **changes})
    return lines_of(changes.get("out", tmp_path / "out"))


def numbers_of(value) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers_of(each)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_rehearsal_every_step_leaves_a_row_with_numbers(
    gpu_run, gpu_report, tmp_path, checkpoints, start_here, monkeypatch
):
    monkeypatch.setattr(gpu_run, "demo_model", lambda: checkpoints("llama"))
    lines = take(gpu_run, tmp_path, starter=start_here)
    ended = {line["step"]: line["code"] for line in lines if line.get("event") == "ended"}
    assert ended == dict.fromkeys([step.name for step in gpu_run.STEPS], 0), ended
    report = gpu_report.report_of(lines)
    for name, step in report["steps"].items():
        assert any(numbers_of(row) for row in step["rows"]), name
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["results.jsonl", "run.log"]
    (row,) = report["steps"]["compile"]["rows"]
    assert row["programs"] == report["steps"]["compile"]["programs"] == 1 and "error" not in row
    gpu_steps = sys.modules["gpu_steps"]
    for name, forms in (("decode", gpu_steps.FORMS), ("decode-rows", gpu_steps.ROW_FORMS)):
        kinds = {row["kind"] for row in report["steps"][name]["rows"] if "tokens_per_second" in row}
        assert kinds == {"source", *forms.split(",")} and kinds <= {"source", *converted_configs()}
    for part in gpu_report.PARTS.values():
        assert "CPU" in part(report)
    with pytest.raises(SurgeryError, match="rehearsal"):
        gpu_report.merge([tmp_path / "out"])
    # What is done is not done again.
    assert not any("row" in line for line in take(gpu_run, tmp_path, out=tmp_path / "again"))


def endless(gpu_steps, tmp_path: Path):
    record = tmp_path / "work" / "rows.jsonl"
    code = f"import time; open({str(record)!r}, 'a').write('{{\"n\": 1}}\\n'); time.sleep(60)"
    return gpu_steps.Step("endless", 0.3, lambda setup, seconds: ["-S", "-c", code], ("rows.jsonl",))


def test_a_step_past_its_limit_is_ended_and_its_rows_stay(gpu_run, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "STEPS", (endless(sys.modules["gpu_steps"], tmp_path),))
    lines = take(gpu_run, tmp_path, starter=gpu_run.start)
    assert {"step": "endless", "row": {"n": 1}} in lines
    (end,) = [line for line in lines if line.get("event") == "ended"]
    assert end["cut"] and end["code"] != 0 and end["seconds"] < 20
    assert not (tmp_path / "work" / "done").exists()


def test_no_step_begins_without_time_and_wrong_calls_are_refused(gpu_run, tmp_path):
    lines = take(gpu_run, tmp_path, seconds=1.0)
    assert [line["event"] for line in lines] == ["run", *["waits"] * len(gpu_run.STEPS), "end"]
    with pytest.raises(SurgeryError, match="--steps fly: unknown; choose from facts"):
        take(gpu_run, tmp_path, steps="facts,fly")
    with pytest.raises(SurgeryError, match="--max-files 1"):
        take(gpu_run, tmp_path, max_files=1)


def test_parts_join_to_the_model_in_any_order(gpu_run, tmp_path, monkeypatch):
    gpu_pack = sys.modules["gpu_pack"]
    model = tmp_path / "small.gguf"
    model.write_bytes(os.urandom(50_000))
    monkeypatch.setattr(gpu_pack, "_download", lambda name, python, folder: [])
    gpu_pack.pack(tmp_path / "pack", 20_000, "3.12", model, "")
    parts = sorted((tmp_path / "pack").glob("part-*"))
    assert len(parts) == 3
    assert all(sum(file.stat().st_size for file in part.rglob("*") if file.is_file()) <= 20_000 for part in parts)
    arrived, work = tmp_path / "arrived", tmp_path / "machine"
    for number in (2, 0, 1):
        arrived.mkdir(exist_ok=True)
        assert gpu_run._arrived(arrived, work) is None
        parts[number].rename(arrived / parts[number].name)
    joined = gpu_run._arrived(arrived, work)
    assert hashlib.sha256(joined.read_bytes()).digest() == hashlib.sha256(model.read_bytes()).digest()
    with pytest.raises(SurgeryError, match="exists"):
        gpu_pack.pack(tmp_path / "pack", 20_000, "3.12", model, "")
    joined.unlink()
    (work / "model" / "piece-1").write_bytes(b"other")
    (arrived / "part-2" / "model" / "piece-1").write_bytes(b"other")
    with pytest.raises(SurgeryError, match="do not match"):
        gpu_run._arrived(arrived, work)


def test_pages_are_made_from_the_newest_report(gpu_report):
    report = gpu_report.newest()
    for page in gpu_report.PAGES:
        text = (gpu_report.ROOT / page).read_text()
        assert gpu_report.MARK.search(text), page
        assert gpu_report.with_parts(text, report) == text, f"{page}: run python tools/gpu.py merge"
