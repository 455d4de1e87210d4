"""Benchmark runner: checks and times cases, and saves the record after each."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surgery.kernels.backend import interpreted
from surgery.kernels.bench import gate as gates
from surgery.kernels.bench.case import Case, Inputs
from surgery.kernels.bench.measure import Timing, ceilings, device_facts, sets_needed, time_calls

SCHEMA = 1
ROOM = 0.45
"""Maximum share of free memory for the inputs of a case; references and libraries need the rest."""


@dataclass
class Bench:
    """Benchmark run over cases; after ``seconds`` no further one starts, and without ``out`` no record is written.

    ``baselines``: check and time other implementations, on a GPU only; ``say`` receives one line per case.
    """

    device: torch.device
    out: Path | None = None
    seconds: float = float("inf")
    baselines: bool = True
    say: Callable[[str], Any] = field(default=lambda line: print(line, file=sys.stderr, flush=True))
    record: dict = field(default_factory=dict)

    def run(self, cases: Iterable[Case], command: str = "") -> dict:
        """Run all cases and return the record as written: device, versions, ceilings, and a row per case."""
        began = time.monotonic()
        self.record = {
            "schema": SCHEMA,
            "command": command,
            "device": device_facts(self.device),
            "versions": versions(),
            "ceilings": ceilings(self.device) if self.timed else None,
            "note": None if self.timed else no_speed(self.device),
            "rows": [],
        }
        for case in cases:
            if time.monotonic() - began > self.seconds:
                self.record["note"] = f"stopped after {self.seconds:.0f} s: not all cases were measured"
                break
            try:
                row = self._row(case)
            except (torch.OutOfMemoryError, MemoryError):
                row = {**_case_fields(case), "skipped": "out of memory"}
            self.record["rows"].append(row)
            _against_source(self.record["rows"])
            self.say(_line(row))
            self._save()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self._save()
        return self.record

    @property
    def timed(self) -> bool:
        return self.device.type == "cuda"

    def _save(self) -> None:
        if self.out is not None:
            write_json(self.out, self.record)

    def _row(self, case: Case) -> dict:
        row = _case_fields(case)
        size = case.cache_bytes + case.query_bytes
        free = _free_memory(self.device)
        if size > ROOM * free:
            return {**row, "skipped": f"inputs need {size / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"}
        inputs = case.inputs(self.device, seed=0)
        gate = gates.check(case, inputs, baselines=self.baselines and self.timed)
        row["gate"] = gate.to_dict()
        if not gate.passed or not self.timed:
            return row
        sets = [inputs, *(case.inputs(self.device, seed) for seed in range(1, sets_needed(size, self.device)))]
        row |= _measured(case, time_calls([_bound(case.run, one) for one in sets], self.device))
        row |= _shares(row, self.record["ceilings"])
        if self.baselines:
            row["baselines"] = self._baselines(case, sets, gate)
        return row

    def _baselines(self, case: Case, sets: list[Inputs], gate: gates.Gate) -> dict:
        measured = {}
        for name, prepare in case.baselines().items():
            if name in gate.refused:
                measured[name] = {"refused": gate.refused[name]}
                continue
            try:
                timing = time_calls([prepare(one) for one in sets], self.device)
                measured[name] = {"seconds": timing.seconds, "graph": timing.graph, "error": gate.library_errors[name]}
            except Exception as error:
                measured[name] = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
        return measured


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def versions() -> dict:
    """Return the versions of Python, PyTorch, CUDA and Triton."""
    versions_of = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton
    except ImportError:
        return {**versions_of, "triton": None}
    return {**versions_of, "triton": triton.__version__}


def no_speed(device: torch.device) -> str:
    """Return the note that explains why nothing is timed on this device."""
    how = "in Triton's interpreter" if interpreted() else "as PyTorch references"
    return f"not timed on the {device.type} device: operators ran {how}, and only their results were checked"


def _case_fields(case: Case) -> dict:
    return {
        "operation": case.operation,
        "model": case.model,
        "variant": case.variant,
        "batch": case.batch,
        "context": case.context,
        "dtype": str(case.dtype).removeprefix("torch."),
        "bytes": case.bytes,
        "flops": case.flops,
    }


def _measured(case: Case, timing: Timing) -> dict:
    return {
        "seconds": timing.seconds,
        "spread": [timing.low, timing.high],
        "graph": timing.graph,
        "sets": timing.sets,
        "bytes_per_second": case.bytes / timing.seconds,
        "flops_per_second": case.flops / timing.seconds,
    }


def _shares(row: dict, limits: dict) -> dict:
    memory = row["bytes_per_second"] / limits["bytes_per_second"]
    compute = row["flops_per_second"] / limits["flops_per_second"]
    bound = max(row["bytes"] / limits["bytes_per_second"], row["flops"] / limits["flops_per_second"])
    return {"share_of_copy": memory, "share_of_matmul": compute, "share_of_bound": bound / row["seconds"]}


def _against_source(rows: list[dict]) -> None:
    """Add to each decode row the speedup over the source's attention at its shape, by PyTorch's fastest backend."""
    at = {
        (row["model"], row["batch"], row["context"], row["dtype"]): _fastest(row)
        for row in rows
        if row["operation"] == "sdpa" and "seconds" in row
    }
    for row in rows:
        source = at.get((row["model"], row["batch"], row["context"], row["dtype"]))
        if source and "seconds" in row and "decode" in row["operation"]:
            row["speedup_over_source"] = source / row["seconds"]


def _fastest(row: dict) -> float:
    return min(each["seconds"] for each in (row, *row.get("baselines", {}).values()) if "seconds" in each)


def _bound(function: Callable[[Inputs], Any], inputs: Inputs) -> Callable[[], Any]:
    return lambda: function(inputs)


def _free_memory(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4e9


def _line(row: dict) -> str:
    label = f"{row['operation']} {row['model']} {row['variant']} batch {row['batch']} context {row['context']}"
    if "skipped" in row:
        return f"{label}: skipped, {row['skipped']}"
    if not row["gate"]["passed"]:
        return f"{label}: FAILED, {'; '.join(row['gate']['reasons'])}"
    if "seconds" not in row:
        return f"{label}: correct, relative error {row['gate']['error']:.1e}"
    return (
        f"{label}: {row['seconds'] * 1e6:,.1f} us, {row['bytes_per_second'] / 1e9:,.0f} GB/s "
        f"({row['share_of_copy']:.0%} of copy), {row['flops_per_second'] / 1e12:,.0f} TFLOP/s"
    )
