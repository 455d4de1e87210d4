"""The most memory that a stretch of work holds at one time, above what was held before it.

On CUDA it is what PyTorch's allocator has handed out, exact to its blocks. On a Linux CPU it is the resident memory of
the process: the kernel keeps its peak (`VmHWM`, see proc(5)) and forgets it when "5" is written to `clear_refs`. That
includes whatever else the process does meanwhile, and misses what fits in memory that the process had kept from before,
so freed memory is given back to the system first. Expect it to be right to some megabytes.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch import nn

from surgery.common.errors import SurgeryError
from surgery.eval.tensor_bytes import weight_tensors

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Measures peaks in bytes above what was held when it was last zeroed.

        meter = PeakMemory(model)
        with meter.phase() as phase:
            ...
        phase.peak

    Attributes:
        how: how it is measured, or why it is not, in words for a report.
    """

    def __init__(self, model: nn.Module) -> None:
        """Chooses the way by where the model's weights are, and zeroes the meter."""
        devices = {parameter.device for parameter in model.parameters()}
        kinds = {device.type for device in devices}
        self._devices = devices if kinds == {"cuda"} else set()
        self._resident = kinds == {"cpu"} and _peak_can_be_reset()
        if self._devices:
            self.how = "most bytes that PyTorch's CUDA allocator handed out, less those held before the prefill"
        elif self._resident:
            self.how = "peak resident memory of the process (VmHWM of Linux), less that before the prefill"
            _make_resident(model)
        elif kinds == {"cpu"}:
            self.how = "not measured: this system does not let a process reset its peak of resident memory"
        else:
            self.how = f"not measured: there is no way to on {' and '.join(sorted(kinds))}"
        self.zero()

    def zero(self) -> None:
        """Takes what is held now as the level above which peaks are counted."""
        gc.collect()
        if self._resident:
            _give_back_freed_memory()
            self._base = _status("VmRSS")
        else:
            self._base = sum(map(torch.cuda.memory_allocated, self._devices))

    def phase(self) -> Phase:
        """Work to measure, once: `with` it, then read its peak."""
        return Phase(self)

    def _forget_peak(self) -> None:
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if self._resident:
            # What an earlier phase freed must not count for this one.
            _give_back_freed_memory()
            (_PROCESS / "clear_refs").write_text("5")

    def _peak(self) -> int | None:
        if self._devices:
            # Peaks of several devices need not fall together, so their sum is an upper bound.
            return sum(map(torch.cuda.max_memory_allocated, self._devices)) - self._base
        return max(0, _status("VmHWM") - self._base) if self._resident else None


class Phase:
    """The work inside its `with`.

    Attributes:
        peak: bytes, or None where they cannot be measured.
    """

    def __init__(self, meter: PeakMemory) -> None:
        self._meter = meter
        self.peak: int | None = None

    def __enter__(self) -> Phase:
        self._meter._forget_peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = self._meter._peak()


def _peak_can_be_reset() -> bool:
    try:
        (_PROCESS / "clear_refs").write_text("5")
        _status("VmHWM"), _status("VmRSS")
    except (OSError, SurgeryError):
        return False
    return True


def _status(key: str) -> int:
    """A size, in bytes, from this process's status, where it is in kB."""
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SurgeryError(f"{_PROCESS}/status has no {key}: peak memory cannot be measured on this system")


def _give_back_freed_memory() -> None:
    """Has glibc return what was freed; other C libraries have no such call, and do so by themselves or not at all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _make_resident(model: nn.Module) -> None:
    """Reads one byte of every page of the weights: those mapped from a file are otherwise read in as they are used."""
    for tensor in weight_tensors(model):
        storage = tensor.untyped_storage()
        torch.tensor([], dtype=torch.uint8).set_(storage)[::4096].sum()
