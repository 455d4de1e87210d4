"""Bars for people before a terminal; elsewhere lines; and what reports keep of them."""

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
from surgery.common.progress import QUIET, VERBOSE, Progress
from surgery.reporting.report import previous_report

QUICK = ["--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "1", "--fit-steps", "0"]
QUICK += ["--calibration", HELD_OUT, "--to", "gqa", "--kv-heads", "1"]


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
    told = capsys.readouterr().err
    assert told.startswith("2 of 5: convert: 3 layers in 0.") and told.endswith(" s\n")
    assert len(told.splitlines()) == 1 and "\r" not in told


def test_on_a_terminal_it_is_a_bar(capsys, terminal):
    work(Progress())
    told = capsys.readouterr().err
    assert "\r" in told and "2 of 5 convert" in told and "3/3" in told and "layers in" not in told


def test_verbose_lines_have_times_and_memory_on_a_terminal_too(capsys, terminal, monkeypatch):
    monkeypatch.setenv(VERBOSE, "1")
    work(Progress())
    begins, ends = capsys.readouterr().err.splitlines()
    assert begins.endswith("2 of 5: convert …") and ends.endswith("iB at most") and ends[2] == ends[5] == ":"


def test_a_phase_that_lasts_is_told_every_so_often(capsys, monkeypatch):
    monkeypatch.setattr(phases, "TOLD_EVERY", 0.25)
    monkeypatch.setattr(phases, "SAMPLED_EVERY", 0.05)
    with Progress().phase("read", 2**21, "B") as advance:
        advance(2**20)
        time.sleep(0.7)
    told = capsys.readouterr().err.splitlines()
    assert 2 <= len(told) <= 4 and told[0].startswith("read: 1.0 MiB of 2.0 MiB after 0.")


def test_a_phase_that_lasts_says_what_is_left_of_it(capsys, monkeypatch):
    monkeypatch.setattr(phases, "TOLD_EVERY", 0.2)
    monkeypatch.setattr(phases, "SAMPLED_EVERY", 0.05)
    with Progress().phase("ablation", 1000, "head") as advance:
        advance()
        time.sleep(0.5)
    told = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"ablation: 1 of 1,000 heads after 0\.\d s, about \d+ min \d\d s left", told)


def test_a_phase_knows_the_memory_that_it_took():
    progress = Progress(silent=True)
    with progress.phase("small", 1):
        pass
    with progress.phase("large", 1):
        held = mmap.mmap(-1, 2**27)  # new pages for sure: malloc may have some left of earlier tests
        held[:: mmap.PAGESIZE] = bytes(2**27 // mmap.PAGESIZE)
        time.sleep(0.3)
        held.close()
    with progress.phase("small again", 1):
        pass
    assert progress.peaks["large"] >= progress.peaks["small"] + 0.9 * 2**27
    assert progress.peaks["small again"] < progress.peaks["large"] - 0.5 * 2**27
    assert progress.seconds["large"] >= 0.3 and list(progress.seconds) == list(progress.peaks)


def test_units_are_told_as_people_say_them():
    for unit, count, text in (("batch", 2, "2 batches"), ("layer", 1, "1 layer"), ("token", 1234, "1,234 tokens")):
        phase = phases.Phase("x", count, unit, lambda _: None)
        phase.done = count
        phase.end()
        assert phase.amount() == text


def test_what_stops_a_phase_is_told_where_more_is_wanted(monkeypatch, capsys):
    monkeypatch.setenv(VERBOSE, "1")
    with pytest.raises(ZeroDivisionError), Progress().phase("convert", 3) as advance:
        advance()
        _ = 1 / 0
    assert "convert: stopped at 1 of 3 layers after" in capsys.readouterr().err


def test_what_is_silent_or_quiet_shows_nothing(capsys):
    Progress(silent=True).note("silent")
    with environment(**QUIET):
        Progress().note("quiet")
    assert capsys.readouterr().err == ""


def test_lines_of_a_verb(checkpoints, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    code, _, told = run_main(monkeypatch, capsys, "convert", checkpoints("llama"), "--out", out, *QUICK, "--verbose")
    assert code == 0 and VERBOSE not in os.environ and "\r" not in told
    ends = re.findall(r"(\d) of 6: (.*): [^:]* at most$", told, re.MULTILINE)
    numbers = [int(number) for number, _ in ends]
    assert numbers == sorted(numbers) and {1, 2, 4, 5, 6} == set(numbers)
    report = previous_report(out)
    assert [name for _, name in ends][: len(report["seconds"])] == list(report["seconds"])
    assert report["phase_peak_bytes"].keys() == report["seconds"].keys() >= {"convert", "verify: reload and run"}
    assert 0 < max(report["phase_peak_bytes"].values()) <= report["peak_memory_bytes"]
