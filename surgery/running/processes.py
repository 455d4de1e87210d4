"""Measuring over several processes: every batch is done by one of them, and all of them end with all results.

Batches are made before they are dealt out, so that a batch holds the same samples whatever the number of processes, and
results come back in the order of the batches. Two processes therefore give the numbers of one.
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
from torch import Tensor

from surgery.common.errors import ProcessLost, SurgeryError
from surgery.common.machine_faults import fault_message

if TYPE_CHECKING:
    from accelerate import PartialState

Item = TypeVar("Item")
Result = TypeVar("Result")

JOINING = 600.0
"""Seconds in which the process that the others meet at must answer."""
PATIENCE = timedelta(weeks=4)
"""Time for which a process waits for the others. The default of minutes would end a run while one of them measures
alone; a process that died ends the others through their launcher."""


class Processes:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone.

    Attributes:
        rank: number of this process, from 0.
        count: how many there are.
    """

    def __init__(self, *, cpu: bool = False, alone: bool = False) -> None:
        """Joins them.

        Args:
            cpu: keeps them off the accelerators.
            alone: whether this one works by itself, whatever others there are.
        """
        self.rank, self.count = 0, 1
        self._state = None
        if not alone and world_size() > 1:
            check_launch()
            # Without an accelerator, accelerate takes several processes for one each unless it is told.
            self._state = partial_state()(cpu=cpu or not torch.accelerator.is_available(), timeout=PATIENCE)
            self.rank, self.count = self._state.process_index, self._state.num_processes
            if self._state.backend == "gloo":
                # Its threads abort a process that ends before them, now and then.
                atexit.register(leave)

    @property
    def is_main(self) -> bool:
        """Return whether this process prints and writes."""
        return self.rank == 0

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], advance: Callable[[], Any] = int) -> list:
        """`function` of every item, in order, on every process; each process computes its share.

        Args:
            function: its results must pickle; tensors should be on the CPU.
            advance: called after every item of this process, and for those that others did meanwhile.

        Raises:
            SurgeryError: `function` did in some process; every process raises that of the lowest rank.
        """
        mine: list[tuple[int, Any]] = []
        refusal = None
        try:
            for index in range(self.rank, len(items), self.count):
                mine.append((index, function(items[index])))
                for _ in range(min(self.count, len(items) - index + self.rank)):
                    advance()
        except Exception as error:
            refusal = self._refusal(error)
        if self._state is None:
            shares = [(mine, refusal)]
        else:
            from accelerate.utils import gather_object

            with self._together():
                shares = gather_object([(mine, refusal)])
        for _, refusal in shares:
            if refusal is not None:
                raise refusal
        return [
            result for _, result in sorted((pair for share, _ in shares for pair in share), key=lambda pair: pair[0])
        ]

    def in_turn(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results of `map` one after the other, for large ones: no process holds more than two of them.

        Every process has to take all of them.

        Raises:
            SurgeryError: `function` did in some process, in place of its result.
        """
        for start in range(0, len(items), self.count):
            outcome: tuple[Any, SurgeryError | None] = (None, None)
            if start + self.rank < len(items):
                try:
                    outcome = (function(items[start + self.rank]), None)
                except Exception as error:
                    outcome = (None, self._refusal(error))
            for rank in range(min(self.count, len(items) - start)):
                yield self._from(rank, outcome)

    def from_main(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function` on the main process; the others wait for it and do not call it.

        Raises:
            SurgeryError: `function` did; every process raises it, so that all can go on with what comes next.
        """
        if self._state is None:
            return function()
        outcome: tuple[Any, SurgeryError | None] = (None, None)
        if self.is_main:
            try:
                outcome = (function(), None)
            except Exception as error:
                outcome = (None, self._refusal(error))
        return self._from(0, outcome)

    def first_on_main(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function` on each process, once it went well on the main one.

        Raises:
            SurgeryError: `function` did on the main process; every process raises it.
        """
        results: list[Result] = []
        self.from_main(lambda: results.append(function()))
        return results[0] if results else function()

    def _from(self, rank: int, outcome: tuple[Any, SurgeryError | None]) -> Any:
        """The result that one process has; where it has a refusal, all raise that."""
        if self._state is not None:
            from accelerate.utils import broadcast_object_list

            with self._together():
                (outcome,) = broadcast_object_list([outcome], from_process=rank)
        result, refusal = outcome
        if refusal is not None:
            raise refusal
        return result

    def _refusal(self, error: Exception) -> SurgeryError:
        """Return the error to raise on all processes; raises an error that is no refusal."""
        if self._state is None:
            raise error
        if not isinstance(error, SurgeryError):
            if (line := fault_message(error)) is None:
                raise error
            error = SurgeryError(line)
        error.shared = True
        return error

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Fail on all processes of a collective block where one of them has ended."""
        try:
            yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ProcessLost(f"one of {self.count} processes has ended before its work was done ({reason})") from error

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of every process's `tensor` of one shape, the same to the last bit on all of them.

        For small ones: they are pickled, and added in the order of the processes' ranks.
        """
        if self._state is None:
            return tensor
        from accelerate.utils import gather_object

        with self._together():
            total, *others = gather_object([tensor.detach().cpu()])
        for other in others:
            total = total + other
        return (total / self.count).to(tensor.device)

    def sendable(self, value: Any) -> Any:
        """Return a result as other processes can take it: a tensor on the CPU, where there are others."""
        return value.cpu() if self.count > 1 and isinstance(value, Tensor) else value

    def wait(self) -> None:
        """Until all processes are here."""
        if self._state is not None:
            with self._together():
                self._state.wait_for_everyone()


def world_size() -> int:
    """Return how many processes a launcher started, as it says in ``WORLD_SIZE``; 1 without one.

    Raises:
        SurgeryError: that is no number.
    """
    size = os.environ.get("WORLD_SIZE") or "1"
    if not size.isdecimal():
        raise SurgeryError(f"WORLD_SIZE={size}: not a number of processes; unset it, or use accelerate launch")
    return int(size)


def check_launch() -> None:
    """Check what a launcher tells processes of each other, and that they can meet, before they wait for weeks.

    Raises:
        SurgeryError: a variable is missing, or nothing answers where all processes meet.
    """
    size = os.environ["WORLD_SIZE"]
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise SurgeryError(
            f"WORLD_SIZE={size} says that a launcher started {size} processes, but {', '.join(missing)} is not set; "
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
        except ConnectionRefusedError as error:  # it is there; the first process listens later itself
            if is_first:
                return
            reason: Exception = error
        except (OSError, UnicodeError) as error:
            reason = error
        if is_first or time.monotonic() > deadline:
            raise SurgeryError(
                f"MASTER_ADDR={address}, MASTER_PORT={port}: the first process does not answer there ({reason}); set "
                "them to where the process of RANK=0 runs, and open that port"
            )
        time.sleep(0.2)


def partial_state() -> type[PartialState]:
    """accelerate's, which takes a second to load."""
    from accelerate import PartialState

    return PartialState


def leave() -> None:
    """Ends what this process has in common with others; where these wait for it, they miss it."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


ALONE = Processes(alone=True)
