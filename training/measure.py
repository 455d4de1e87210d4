"""Numbers of a run that all its processes agree on: held-out losses, sums, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from surgery.common.memory import peak_memory as resident_peak
from surgery.eval.logits import evaluation_mode
from surgery.training.data import IGNORED, TrainingRow, collate


@torch.no_grad()
def held_out_losses(
    accelerator: Accelerator, module: nn.Module, rows: Sequence[TrainingRow], batch_size: int, names: Sequence[str]
) -> dict[str, float]:
    """Mean losses, in nats per predicted token, over all rows; the same on every process.

    Rows are dealt to the processes in batches, of which each process computes as many as the others, since those of a
    sharded model must: what it has too few of are batches that predict nothing.

    Args:
        module: a `distillation.Distillation`, maybe wrapped; it measures in evaluation mode.
        names: of the parts that it gives.
    """
    batches = [collate(rows[first : first + batch_size]) for first in range(0, len(rows), batch_size)]
    nothing = replace(batches[0], labels=torch.full_like(batches[0].labels, IGNORED), predicting=None)
    while len(batches) % accelerator.num_processes:
        batches.append(nothing)
    sums: list[Tensor] = []
    predicted = 0
    with evaluation_mode(module):
        for batch in batches[accelerator.process_index :: accelerator.num_processes]:
            predicted += batch.predicted
            _, parts = module(batch.to(accelerator.device), 1.0, measure=True)
            sums.append(torch.stack([parts[name] for name in names]))
    totals = [0.0] * len(names)
    for values in torch.stack(sums).tolist():  # here the device is waited for, once
        totals = [total + value for total, value in zip(totals, values, strict=True)]
    *totals, positions = summed(accelerator, [*totals, float(predicted)])
    return {name: total / max(positions, 1.0) for name, total in zip(names, totals, strict=True)}


def summed(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Sums of plain numbers over all processes, the same on each."""
    if accelerator.num_processes == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(tensor, "sum").tolist()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: handed out by PyTorch on CUDA, resident on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_peak()
