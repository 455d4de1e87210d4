"""SIGTERM, SIGHUP and Ctrl-C: one line, the shell's exit code, and nothing left but what is worth going on from."""

import os
import signal
import sys
import tempfile
import threading
import time

import pytest
from command_line import run_main

from surgery.cli import program as cli
from surgery.common import interruption
from surgery.common.interruption import interruptible, resumes_from
from surgery.healing.launchers import run_interruptible
from surgery.structures.stages import StageTracker
from surgery.training.guards import StopRequest

HUNG_UP = pytest.mark.skipif(signal.getsignal(1) is signal.SIG_IGN, reason="nohup: a hangup is not to stop anything")
SIGNALS = pytest.mark.parametrize(
    ("number", "code"), ((signal.SIGTERM, 143), (signal.SIGINT, 130), pytest.param(1, 129, marks=HUNG_UP))
)


@SIGNALS
def test_what_had_just_begun_leaves_nothing(number, code, checkpoints, tmp_path, monkeypatch, capsys):
    source, temporary = checkpoints("llama"), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    there = []

    def stop(*_):
        there.extend(path.name for path in tmp_path.iterdir())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(StageTracker, "advance", stop)
    before = signal.getsignal(number)
    arguments = ["convert", source, "--out", tmp_path / "out", "--calibration", "none", "--kv-ratio", "0.5"]
    ended, out, err = run_main(monkeypatch, capsys, *arguments)
    assert (ended, out) == (code, "")
    assert err.splitlines()[-1] == "surgery: interrupted; nothing was kept"
    assert "out.partial" in there
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"] and not list(temporary.iterdir())
    assert signal.getsignal(number) is before


@SIGNALS
@pytest.mark.parametrize("files", ((), (".surgery-marker",), ("results/one.json",)))
def test_an_interruption_names_the_work_that_is_left(files, number, code, tmp_path, monkeypatch, capsys):
    def begin():
        resumes_from(tmp_path / "out")
        for name in files:
            path = tmp_path / "out" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        os.kill(os.getpid(), number)

    monkeypatch.setattr(interruption, "_unfinished", [])
    monkeypatch.setattr(cli, "app", begin)
    ended, _, err = run_main(monkeypatch, capsys, "eval", "ckpt")
    leftovers = f"{tmp_path / 'out'} keeps the finished work" if "results/one.json" in files else "nothing was kept"
    assert ended == code and err.startswith(f"surgery: interrupted; {leftovers}")


def test_a_second_sigterm_does_not_stop_the_cleaning_up():
    cleaned = False
    with interruptible() as stopped, pytest.raises(KeyboardInterrupt):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned and stopped.exit_code == 143


def test_a_training_saves_undisturbed_by_a_second_sigterm():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM and signal.getsignal(signal.SIGINT) is before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


CHILD = """
import pathlib, signal, sys, time
def save(*_): pathlib.Path(sys.argv[1]).write_text('saved'); sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""


def _wait_for(path, seconds=30):
    began = time.monotonic()
    while not path.exists():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)


def test_an_interrupted_healing_has_its_training_save_first(tmp_path):
    """The child, in a process group of its own, gets SIGTERM and the time to do something about it."""
    saved, ready = tmp_path / "saved", tmp_path / "ready"

    def interrupt():
        _wait_for(ready)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with interruptible() as stopped, pytest.raises(KeyboardInterrupt):
        run_interruptible([sys.executable, "-c", CHILD, str(saved), str(ready)], dict(os.environ))
    assert stopped.exit_code == 143 and saved.read_text() == "saved"
