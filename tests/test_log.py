"""Bars for people before a terminal; elsewhere lines; a log of both, for people or as JSON; and what reports keep."""

import json
import mmap
import os
import re
import sys
import time

import pytest
from command_line import run_main
from tiny_models import HELD_OUT

from surgery.common import phase as phases
from surgery.common.environment import environment
from surgery.common.errors import SurgeryError
from surgery.common.log import LOG_FILE, VERBOSE, log, logged
from surgery.common.progress import QUIET, Progress
from surgery.reporting.report import previous_report

QUICK = ["--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "1"]
QUICK += ["--calibration", HELD_OUT, "--to", "gqa", "--kv-heads", "1"]


@pytest.fixture
def logged_as(tmp_path, monkeypatch):
    """Log what follows into a file of that name; yield its lines."""

    def begin(name):
        monkeypatch.setenv(LOG_FILE, str(tmp_path / name))
        return lambda: (tmp_path / name).read_text().splitlines()

    return begin


@pytest.fixture
def terminal(capsys, monkeypatch):
    """Standard error as a terminal has it."""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)


def work(progress, count=3):
    with progress.step(2, 5), progress.phase("convert", count) as advance:
        for _ in range(count):
            advance()


def test_elsewhere_than_on_a_terminal_a_phase_is_one_line(capsys):
    work(Progress())
    err = capsys.readouterr().err
    assert err.startswith("2 of 5: convert: 3 layers in 0.") and err.endswith(" s\n")
    assert len(err.splitlines()) == 1 and "\r" not in err


def test_on_a_terminal_it_is_a_bar(capsys, terminal):
    work(Progress())
    err = capsys.readouterr().err
    assert "\r" in err and "2 of 5 convert" in err and "3/3" in err and "layers in" not in err


def test_verbose_lines_have_times_and_memory_on_a_terminal_too(capsys, terminal, monkeypatch):
    monkeypatch.setenv(VERBOSE, "1")
    work(Progress())
    begins, ends = capsys.readouterr().err.splitlines()
    assert begins.endswith("2 of 5: convert …") and ends.endswith("iB at most") and ends[2] == ends[5] == ":"


def test_a_phase_that_lasts_is_told_every_so_often(capsys, monkeypatch, logged_as):
    monkeypatch.setattr(phases, "TOLD_EVERY", 0.25)
    monkeypatch.setattr(phases, "SAMPLED_EVERY", 0.05)
    lines = logged_as("log.jsonl")
    with Progress().phase("read", 2**21, "B") as advance:
        advance(2**20)
        time.sleep(0.7)
    err_lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(err_lines) <= 4 and err_lines[0].startswith("read: 1.0 MiB of 2.0 MiB after 0.")
    events = [json.loads(line)["event"] for line in lines()]
    assert events == ["begin", *["going"] * (len(err_lines) - 1), "end"]


def test_a_phase_that_lasts_says_what_is_left_of_it(capsys, monkeypatch):
    monkeypatch.setattr(phases, "TOLD_EVERY", 0.2)
    monkeypatch.setattr(phases, "SAMPLED_EVERY", 0.05)
    with Progress().phase("ablation", 1000, "head") as advance:
        advance()
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"ablation: 1 of 1,000 heads after 0\.\d s, about \d+ min \d\d s left", lines)


def test_the_time_left_in_all_follows_from_the_work_expected(monkeypatch, logged_as):
    monkeypatch.setattr(phases, "TOLD_EVERY", 0.2)
    monkeypatch.setattr(phases, "SAMPLED_EVERY", 0.05)
    lines, progress = logged_as("log.jsonl"), Progress()
    progress.expect({"skipped": 7, "read": 1, "write": 4})
    with progress.phase("read", 4) as advance:
        advance(2)  # by an earlier run
        advance()
        time.sleep(0.3)
        advance()
    with progress.phase("unexpected", 1) as advance:
        advance()
    with progress.phase("write", 4) as advance:
        advance()
    events = {(event["event"], event["phase"]): event for event in map(json.loads, lines())}
    going, read, write = events["going", "read"], events["end", "read"], events["end", "write"]
    # A quarter of 1 took what the clock says, and a quarter of 1 and 4 are left; then 4 after a half; then 3 of 1.5.
    assert going["seconds_left"] == pytest.approx(17 * going["seconds"], abs=0.2)
    assert " left in all" in going["text"] and "seconds_left" not in events["end", "unexpected"]
    assert read["seconds_left"] == pytest.approx(8 * read["seconds"], abs=0.2)
    assert write["seconds_left"] == pytest.approx(2 * (read["seconds"] + write["seconds"]), abs=0.2)


def test_the_time_left_of_a_step_is_told_as_such(logged_as):
    lines, progress = logged_as("log.jsonl"), Progress().fresh()
    progress.expect({"read": 1})
    with progress.phase("read", 2) as advance:
        advance()
        advance()
    (end,) = (event for event in map(json.loads, lines()) if event["event"] == "end")
    assert end["step_seconds_left"] == 0 and "seconds_left" not in end


def test_a_phase_knows_the_memory_that_it_took():
    progress = Progress(silent=True)
    with progress.phase("small", 1):
        pass
    with progress.phase("large", 1):
        values = mmap.mmap(-1, 2**27)  # new pages for sure: malloc may have some left of earlier tests
        values[:: mmap.PAGESIZE] = bytes(2**27 // mmap.PAGESIZE)
        time.sleep(0.3)
        values.close()
    with progress.phase("small again", 1):
        pass
    assert progress.peaks["large"] >= progress.peaks["small"] + 0.9 * 2**27
    assert progress.peaks["small again"] < progress.peaks["large"] - 0.5 * 2**27
    assert progress.seconds["large"] >= 0.3 and list(progress.seconds) == list(progress.peaks)


def test_what_stops_a_phase_is_in_the_log(logged_as, capsys):
    lines = logged_as("log.txt")
    with pytest.raises(ZeroDivisionError), Progress().phase("convert", 3) as advance:
        advance()
        _ = 1 / 0
    assert lines()[-1][20:].startswith("convert: stopped at 1 of 3 layers after") and capsys.readouterr().err == ""


def test_what_is_silent_is_not_in_the_log_and_what_is_quiet_is(logged_as, capsys):
    lines = logged_as("log.txt")
    Progress(silent=True).note("silent")
    with environment(**QUIET):
        Progress().note("quiet")
    assert [line[20:] for line in lines()] == ["quiet"] and capsys.readouterr().err == ""


def test_units_are_told_as_people_say_them():
    for unit, count, text in (("batch", 2, "2 batches"), ("layer", 1, "1 layer"), ("token", 1234, "1,234 tokens")):
        phase = phases.Phase("x", count, unit, lambda _: None)
        phase.done = count
        phase.end()
        assert phase.amount() == text


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path):
    with (
        pytest.raises(SurgeryError, match="--log-file"),
        logged("x", tmp_path / "no" / "a", verbose=False),
    ):
        pytest.fail("the work began")
    assert LOG_FILE not in os.environ


def test_a_log_of_a_verb(checkpoints, tmp_path, monkeypatch, capsys):
    out, file = tmp_path / "out", tmp_path / "log.jsonl"
    arguments = ["convert", checkpoints("llama"), "--out", out, *QUICK, "--log-file", file]
    code, _, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 0 and LOG_FILE not in os.environ and "\r" not in err
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(event["text"].endswith(" at most") for event in events if event["event"] == "end")
    assert events[0]["event"] == "command" and str(out) in events[0]["text"] and events[-1]["event"] == "done"
    ends = [event for event in events if event["event"] == "end"]
    numbers = [int(event["at"].split(" of ")[0]) for event in ends]
    assert numbers == sorted(numbers) and {1, 2, 4, 5, 6} == set(numbers)
    assert {event["at"].split(" of ")[1] for event in ends} == {"6"}
    assert len({event["phase"] for event in ends}) == len(ends)
    assert [f"{event['at']}: {event['phase']}" for event in ends] == [
        line.rsplit(": ", 1)[0] for line in err.splitlines() if " of 6: " in line
    ]
    report = previous_report(out)
    assert report["phase_peak_bytes"].keys() == report["seconds"].keys() >= {"convert", "verify: reload and run"}
    assert 0 < max(report["phase_peak_bytes"].values()) <= report["peak_memory_bytes"]
    assert min(report["phase_flops"].values()) > 0 and report["phase_flops"].keys() <= report["seconds"].keys()
    code, _, _ = run_main(monkeypatch, capsys, *arguments)
    last = json.loads(file.read_text().splitlines()[-1])
    assert code == 1 and last["event"] == "error" and "exists" in last["text"]


def test_one_of_several_processes_logs(tmp_path, monkeypatch):
    file = tmp_path / "log.txt"
    monkeypatch.setenv("RANK", "1")
    with logged("second", file, verbose=False):
        log("note", "second")
    monkeypatch.setenv("RANK", "0")
    with logged("first", file, verbose=False):
        log("note", "first")
    assert "second" not in file.read_text() and "first" in file.read_text()
