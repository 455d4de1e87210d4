"""Layer-wise fits that all processes of a conversion share: one of them does everything but sums over the sequences.

The others wait for a fit and take part in it until there are no more. What enters and is wanted of a layer lies in
files beside the boundaries, which all map; its weights and metric are handed on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.sweep import BoundaryStore
from surgery.running.processes import ALONE, Processes
from surgery.running.threads import torch_threads

Fit = Callable[..., Any]
"""One of `surgery.transforms`: from a layer, inputs, targets, a metric and an effort, with ``processes``."""


class SharedFits:
    """Calls fits on all processes; as a context manager lets the others go at its end.

    Args:
        store: of boundaries, in whose folder the files are.
        first: number of a file there that is no boundary's.
    """

    def __init__(self, processes: Processes, store: BoundaryStore, first: int):
        self._processes, self._store, self._first = processes, store, first
        self._waiting = processes.count > 1

    def __call__(
        self,
        fit: Fit,
        layer: Any,
        inputs: Tensor,
        targets: Tensor,
        metric: Tensor,
        effort: Any,
        *,
        shared: Tensor | None = None,
    ) -> Any:
        """What ``fit`` gives, to the same bits as by one process with as many threads as each of several has.

        Args:
            layer: with ``to``, as all that fits take.
            shared: of what low rank reads beside its inputs.
        """
        beside = {} if shared is None else {"shared": shared}
        if not self._waiting:
            return fit(layer, inputs, targets, metric, effort, **beside, processes=ALONE)
        tensors = {"inputs": inputs, "targets": targets, **beside}
        for number, tensor in enumerate(tensors.values(), self._first):
            self._store.save(number, tensor)
        self._waiting = False  # but in the midst of a fit, should that fail
        self._processes.from_main(lambda: (fit, layer.to("cpu"), metric.cpu(), effort, tuple(tensors)))
        try:
            with torch_threads(self._threads()):
                found = fit(layer, inputs, targets, metric, effort, **beside, processes=self._processes)
        finally:
            for number in range(self._first, self._first + len(tensors)):
                self._store.forget(number)  # mapped by all; no snapshot is to speak of it
        self._waiting = True
        return found

    def take_part(self, device: torch.device) -> None:
        """What the others do: until `end` they compute their share of every fit, on a device."""
        while asked := self._processes.from_main(tuple):
            fit, layer, metric, effort, names = asked
            tensors = {name: self._store.load(number) for number, name in enumerate(names, self._first)}
            self._threads()
            fit(layer.to(device), metric=metric.to(device), effort=effort, **tensors, processes=self._processes)

    def end(self) -> None:
        """Lets the others go, if they wait for a fit: there is none any more."""
        if self._waiting:
            self._waiting = False
            self._processes.from_main(tuple)

    def __enter__(self) -> SharedFits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _threads(self) -> int:
        """How many threads the last of the processes has."""
        return self._processes.map(lambda _: torch.get_num_threads(), range(self._processes.count))[-1]
