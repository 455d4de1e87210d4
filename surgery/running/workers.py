"""Processes that this one starts for a function in which they do their share, and that end with it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from surgery.common.environment import environment
from surgery.common.errors import ProcessLost, SurgeryError
from surgery.common.progress import QUIET
from surgery.running.processes import leave, partial_state
from surgery.running.threads import torch_threads

READY, LOST = b"ready\n", 3
"""What one says when it begins, and the exit code of one that misses another."""
PATIENCE = 20.0
"""Seconds that a process has to end by itself."""


@contextmanager
def workers(count: int | None, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[None]:
    """Has ``count`` - 1 processes call a function while the block lasts, as what `Processes` then finds.

    Processors are shared: in the others torch takes that part of the threads that it has here.

    Args:
        function: of a module, with arguments that pickle.

    Raises:
        SurgeryError: this process is one of several already.
        ProcessLost: one has ended before its work was done.
    """
    if count in (None, 1):
        yield
        return
    if "WORLD_SIZE" in os.environ:
        raise SurgeryError("--processes starts processes, of which a launcher has started some: leave it out")
    state = partial_state()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    world |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    world["OMP_NUM_THREADS"] = str(thread_share(count))
    work, started = pickle.dumps((function, dict(arguments))), []
    try:
        with environment(**world, RANK="0", LOCAL_RANK="0"):
            for rank in range(1, count):
                started.append(_Worker(rank, work))
            if not all([worker.ready() for worker in started]):
                raise ProcessLost("a process did not begin")
            yield
    except ProcessLost as lost:
        raise ProcessLost(_why(started) or str(lost)) from lost
    finally:
        leave()
        state._reset_state()  # there are no others any more
        for worker in started:
            worker.stop()


def thread_share(count: int) -> int:
    """Of torch's threads in this process, what one of several can have."""
    return max(1, torch.get_num_threads() // count)


def sharing_threads(count: int | None) -> AbstractContextManager[None]:
    """Has torch take that part of its threads in the block that it takes in each of the others."""
    return torch_threads(thread_share(count or 1))


def _why(started: list[_Worker]) -> str | None:
    """What ended the first of them; the others miss it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = [worker.failure() for worker in started]
        if reason := next((reason for reason in found if reason), None):
            return reason
        if None not in found:
            break
        time.sleep(0.05)
    return None


class _Worker:
    """One of the processes; what it says before it fails comes through a pipe."""

    def __init__(self, rank: int, work: bytes):
        self._rank = rank
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "surgery.running.worker", str(writer), str(os.getpid())]
        variables = {**os.environ, **QUIET, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "pass_fds": [writer]}
        # Of a session of its own: a terminal's Ctrl-C is for this process alone, which then ends the others.
        self._process = subprocess.Popen(command, env=variables, start_new_session=True, **pipes)
        os.close(writer)
        self._said = os.fdopen(reader, "rb")
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(work)

    def ready(self) -> bool:
        return self._said.readline() == READY

    def failure(self) -> str | None:
        """What ended it; nothing where it ended well or missed another, None where it has not ended."""
        code = self._process.poll()
        if code in (None, 0, LOST):
            return None if code is None else ""
        said = self._said.read().decode().strip()
        return said or f"process {self._rank + 1} {ended(code)}"

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


def ended(code: int) -> str:
    """How a process ended, in words; below zero its exit code is the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (", as systems do that run out of memory" if name == "SIGKILL" else "")
