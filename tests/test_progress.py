"""Bars for people before a terminal; elsewhere lines; and what reports keep."""

import mmap
import os
import re
import sys
import time

import pytest
from command_line import run_main
from tiny_models import SHORT_TEXT_FLAGS

from surgery.cli.commands import environment
from surgery.common import phase as phases
from surgery.common.progress import QUIET, VERBOSE, Progress
from surgery.reporting.report import previous_report


@pytest.fixture
def told(monkeypatch):
    """Let a phase print a line every 0.2 s."""
    monkeypatch.setattr(phases, "TOLD_EVERY", 0.2)
    monkeypatch.setattr(phases, "SAMPLED_EVERY", 0.05)


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


def test_verbose_lines_have_times_and_memory_on_a_terminal_too(capsys, terminal):
    with environment(**VERBOSE):
        work(Progress())
    begins, ends = capsys.readouterr().err.splitlines()
    assert begins.endswith("2 of 5: convert …") and ends.endswith("iB at most") and ends[2] == ends[5] == ":"


def test_a_phase_that_lasts_is_told_every_so_often(capsys, told):
    with Progress().phase("read", 2**21, "B") as advance:
        advance(2**20)
        time.sleep(0.7)
    *going, end = capsys.readouterr().err.splitlines()
    assert 1 <= len(going) <= 4 and all(line.startswith("read: 1.0 MiB of 2.0 MiB after 0.") for line in going)
    assert end.startswith("read: 1.0 MiB of 2.0 MiB in 0.")


def test_a_phase_that_lasts_says_what_is_left_of_it(capsys, told):
    with Progress().phase("ablation", 1000, "head") as advance:
        advance()
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"ablation: 1 of 1,000 heads after 0\.\d s, about \d+ min \d\d s left", lines)


LEFT = r"(?:unexpected|read|write): .* after (\d\.\d) s, about (\d+\.\d) s left in all"


def test_the_time_left_in_all_follows_from_the_work_expected(capsys, told):
    progress = Progress()
    progress.expect({"skipped": 7, "read": 1, "write": 4})
    with progress.phase("read", 4) as advance:
        advance(2)  # by an earlier run
        advance()
        time.sleep(0.3)
        advance()
    with progress.phase("unexpected", 1) as advance:
        time.sleep(0.3)
        advance()
    with progress.phase("write", 4) as advance:
        advance(2)
        advance()
        time.sleep(0.3)
        advance()
    lines = capsys.readouterr().err.splitlines()
    read, unexpected, write = (next(line for line in lines if line.startswith(name)) for name in progress.seconds)
    assert "left" not in unexpected
    # A quarter of 1 took what the clock says, and a quarter of 1 and 4 are left; then 1 after a half and 1.
    seconds, left = map(float, re.fullmatch(LEFT, read).groups())
    assert left == pytest.approx(17 * seconds, abs=17 * 0.05 + 0.1)
    seconds, left = map(float, re.fullmatch(LEFT, write).groups())
    assert left == pytest.approx((seconds + progress.seconds["read"]) / 1.5, abs=0.1)


def test_the_time_left_of_a_step_is_told_as_such(capsys, told):
    progress = Progress().fresh()
    progress.expect({"read": 1})
    with progress.phase("read", 2) as advance:
        advance()
        time.sleep(0.3)
        advance()
    assert re.search(r"about 0\.\d s left of this step$", capsys.readouterr().err, re.MULTILINE)


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


@pytest.mark.parametrize("verbose", [True, False])
def test_what_stops_a_phase_is_told_to_who_wants_all(capsys, verbose):
    variables = VERBOSE if verbose else {}
    with environment(**variables), pytest.raises(ZeroDivisionError), Progress().phase("convert", 3) as advance:
        advance()
        _ = 1 / 0
    assert ("convert: stopped at 1 of 3 layers after" in capsys.readouterr().err) == verbose


def test_what_is_silent_or_quiet_is_not_told(capsys):
    Progress(silent=True).note("silent")
    with environment(**QUIET):
        Progress().note("quiet")
        work(Progress())
    work(Progress(), 0)  # a phase with nothing to do
    assert capsys.readouterr().err == ""


def test_units_are_told_as_people_say_them():
    for unit, count, text in (("batch", 2, "2 batches"), ("layer", 1, "1 layer"), ("token", 1234, "1,234 tokens")):
        phase = phases.Phase("x", count, unit, lambda _: None)
        phase.done = count
        phase.end()
        assert phase.amount() == text


def test_phases_of_a_verb(checkpoints, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = [
        "convert",
        checkpoints("llama"),
        "--out",
        out,
        "--to",
        "gqa",
        "--kv-heads",
        "1",
        *SHORT_TEXT_FLAGS,
        "--verbose",
    ]
    code, _, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 0 and not VERBOSE.keys() & os.environ.keys() and "\r" not in err
    ends = [line[9:] for line in err.splitlines() if line.endswith(" at most")]
    numbers = [int(end.split(" of 6: ")[0]) for end in ends]
    assert numbers == sorted(numbers) and {1, 2, 4, 5, 6} == set(numbers)
    phases = [end.split(" of 6: ")[1].rsplit(": ", 1)[0] for end in ends]
    assert len(set(phases)) == len(phases)
    report = previous_report(out)
    assert report["phase_peak_bytes"].keys() == report["seconds"].keys() >= {"convert", "verify: reload and run"}
    assert 0 < max(report["phase_peak_bytes"].values()) <= report["peak_memory_bytes"]
    assert min(report["phase_flops"].values()) > 0 and report["phase_flops"].keys() <= report["seconds"].keys()
