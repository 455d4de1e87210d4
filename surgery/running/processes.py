"""Distribution of measurements over processes: each batch is processed once, and all processes get all results.

Batches are formed before they are distributed, so that a batch contains the same samples whatever the number of
processes, and results are returned in the order of the batches. Results thus do not depend on the number of processes.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from surgery.common.errors import ProcessLost, SurgeryError
from surgery.common.machine_faults import fault_message

if TYPE_CHECKING:
    from accelerate import PartialState

Item = TypeVar("Item")
Result = TypeVar("Result")

JOINING = 600.0
"""Seconds in which the rendezvous at MASTER_ADDR must answer."""
PATIENCE = timedelta(weeks=4)
"""Timeout of collectives. With the default of minutes, a run would fail while one process works alone; if a process
dies, the launcher ends the others."""


class Processes:
    """Process group started by `accelerate launch` or `torchrun`, or this process alone: rank and world size."""

    def __init__(self, *, cpu: bool = False, alone: bool = False) -> None:
        """Join the process group, without accelerators if ``cpu``, or ignore it if ``alone``."""
        self.rank, self.count = 0, 1
        self._state = None
        if not alone and world_size() > 1:
            check_launch()
            # Without an accelerator, accelerate forms no process group unless cpu is set.
            self._state = partial_state()(cpu=cpu or not torch.accelerator.is_available(), timeout=PATIENCE)
            self.rank, self.count = self._state.process_index, self._state.num_processes
            if self._state.backend == "gloo":
                # gloo's threads occasionally abort a process at exit.
                atexit.register(leave)

    @property
    def is_main(self) -> bool:
        """True for rank 0, the process that prints and writes."""
        return self.rank == 0

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], advance: Callable[[], Any] = int) -> list:
        """Apply `function` to all items, distributed over processes; return all results in order on every process.

        Results are picklable, with tensors on the CPU; `advance` is called once per item, others' estimated. Raises
        SurgeryError: raised by `function` on any process; every process raises that of the lowest rank.
        """
        own_results: list[tuple[int, Any]] = []
        refusal = None
        try:
            for index in range(self.rank, len(items), self.count):
                own_results.append((index, function(items[index])))
                for _ in range(min(self.count, len(items) - index + self.rank)):
                    advance()
        except Exception as error:
            refusal = self._shared_error(error)
        if self._state is None:
            shares = [(own_results, refusal)]
        else:
            from accelerate.utils import gather_object

            with self._collective():
                shares = gather_object([(own_results, refusal)])
        for _, refusal in shares:
            if refusal is not None:
                raise refusal
        return [
            result for _, result in sorted((pair for share, _ in shares for pair in share), key=lambda pair: pair[0])
        ]

    def from_main(self, function: Callable[[], Result]) -> Result:
        """Call `function` on the main process only and return its result on all.

        Raises SurgeryError: raised by `function`; every process raises it, so that all can continue in step.
        """
        if self._state is None:
            return function()
        outcome: tuple[Any, SurgeryError | None] = (None, None)
        if self.is_main:
            try:
                outcome = (function(), None)
            except Exception as error:
                outcome = (None, self._shared_error(error))
        from accelerate.utils import broadcast_object_list

        with self._collective():
            (outcome,) = broadcast_object_list([outcome])
        result, refusal = outcome
        if refusal is not None:
            raise refusal
        return result

    def _shared_error(self, error: Exception) -> SurgeryError:
        """Return the error to raise on all processes; reraise it if it is no SurgeryError and no machine fault."""
        if self._state is None:
            raise error
        if not isinstance(error, SurgeryError):
            if (line := fault_message(error)) is None:
                raise error
            error = SurgeryError(line)
        error.shared = True
        return error

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Convert the failure of a collective operation to ProcessLost."""
        try:
            yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ProcessLost(f"one of {self.count} processes ended before its work was finished ({reason})") from error

    def wait(self) -> None:
        """Wait for all processes."""
        if self._state is not None:
            with self._collective():
                self._state.wait_for_everyone()


def world_size() -> int:
    """Return the world size from ``WORLD_SIZE``; 1 without a launcher.

    Raises SurgeryError: ``WORLD_SIZE`` is not a number.
    """
    size = os.environ.get("WORLD_SIZE") or "1"
    if not size.isdecimal():
        raise SurgeryError(f"WORLD_SIZE={size}: not a number of processes; unset it, or use accelerate launch")
    return int(size)


def check_launch() -> None:
    """Check the launcher's environment variables, and that the rendezvous is reachable, before the long timeout.

    Raises SurgeryError: a variable is missing or invalid, or the rendezvous does not answer.
    """
    size = os.environ["WORLD_SIZE"]
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise SurgeryError(
            f"WORLD_SIZE={size} is set by a launcher of {size} processes, but {', '.join(missing)} is not set; "
            "start them with accelerate launch or torchrun, or unset WORLD_SIZE"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal() or int(port) >= 2**16:
        raise SurgeryError(f"MASTER_PORT={port}: not a port; use a number below 65536")
    is_first, deadline = os.environ["RANK"] == "0", time.monotonic() + JOINING
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=min(30.0, JOINING)).close()
            return
        except ConnectionRefusedError as error:  # the host is reachable; the first process listens later
            if is_first:
                return
            reason: Exception = error
        except (OSError, UnicodeError) as error:
            reason = error
        if is_first or time.monotonic() > deadline:
            raise SurgeryError(
                f"MASTER_ADDR={address}, MASTER_PORT={port}: the process of RANK=0 does not answer ({reason}); set "
                "them to its host and port, and open that port"
            )
        time.sleep(0.2)


def partial_state() -> type[PartialState]:
    """Import accelerate's PartialState, which takes a second."""
    from accelerate import PartialState

    return PartialState


def leave() -> None:
    """Destroy the process group; other processes that wait for this one then fail."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


ALONE = Processes(alone=True)
