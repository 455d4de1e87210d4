"""A training whose process dies: the parent says how, and that the same command goes on."""

import os
import signal
import sys

import pytest

from surgery.healing.launchers import ended, run_interruptible


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "was ended by SIGKILL, probably because memory ran out"), (signal.SIGSEGV, "by SIGSEGV")],
)
def test_a_worker_that_dies(number, words):
    child = f"import os; os.kill(os.getpid(), {int(number)})"
    code = run_interruptible([sys.executable, "-c", child], dict(os.environ))
    assert words in ended(code)


def test_a_worker_that_fails():
    code = run_interruptible([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    assert ended(code) == "ended with exit code 3"
