"""Measurements of a run: held-out losses, sums over processes, peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from surgery.common.phase import peak_memory as resident_peak
from surgery.eval.logits import evaluation_mode
from surgery.training.data import IGNORED, TrainingRow, collate


@torch.no_grad()
def held_out_losses(
    accelerator: Accelerator, module: nn.Module, rows: Sequence[TrainingRow], batch_size: int, names: Sequence[str]
) -> dict[str, float]:
    """Compute mean losses over all rows, in nats per predicted token; equal on every process.

    Rows are dealt to the processes in batches. Every process runs equally many, as a sharded model requires; batches
    without labels fill up the rest. `module` is a `distillation.Distillation`, possibly wrapped.
    """
    batches = [collate(rows[first : first + batch_size]) for first in range(0, len(rows), batch_size)]
    empty = [replace(row, labels=torch.full_like(row.labels, IGNORED)) for row in rows[:batch_size]]
    while len(batches) % accelerator.num_processes:
        batches.append(collate(empty))
    sums: list[Tensor] = []
    predicted = 0
    with evaluation_mode(module):
        for batch in batches[accelerator.process_index :: accelerator.num_processes]:
            predicted += batch.predicted
            _, parts = module(batch.to(accelerator.device), 1.0, measure=True)
            sums.append(torch.stack([parts[name] for name in names]))
    totals = [0.0] * len(names)
    for values in torch.stack(sums).tolist():  # the only synchronization with the device
        totals = [total + value for total, value in zip(totals, values, strict=True)]
    *totals, positions = summed(accelerator, [*totals, float(predicted)])
    return {name: total / max(positions, 1.0) for name, total in zip(names, totals, strict=True)}


def summed(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Sum floats over all processes; every process gets the sums."""
    if accelerator.num_processes == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(tensor, "sum").tolist()


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: PyTorch's allocator on CUDA, resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_peak()
