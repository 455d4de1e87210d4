"""Whether decoding gets faster by a conversion, from structures and a GPU's ceilings; nothing is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.kernels.gpus import GPU, GPUS
from surgery.kernels.planner import Attention, compare, predict

CONTEXTS = (4_096, 32_768, 131_072)
MOST_ROWS = 256
USABLE = 0.9
"""Share of a GPU's memory that weights and caches may fill."""


def find_gpu(name: str) -> GPU:
    """A GPU by name, or with the ceilings that `surgery bench kernels` has measured and written to a JSON file.

    Raises:
        SurgeryError: it is neither.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if not Path(name).is_file():
        raise SurgeryError(f"--gpu {name}: choose {', '.join(GPUS)}, or a JSON file of surgery bench kernels")
    try:
        measured = json.loads(Path(name).read_text(encoding="utf-8"))
        device, ceilings = measured["device"], measured["ceilings"]
        return replace(
            GPUS["h200"],
            name=device["name"],
            bytes_per_second=float(ceilings["bytes_per_second"]),
            flops_per_second=float(ceilings["flops_per_second"]),
            processors=int(device["processors"]),
            memory_bytes=float(device["memory_bytes"]),
            source=f"measured, {Path(name).name}",
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SurgeryError(f"{name}: not written by surgery bench kernels ({error!r})") from None


def largest_batch(layers: Sequence[Attention], context: int, weight_bytes: float, gpu: GPU) -> int:
    """Rows, a power of two up to `MOST_ROWS`, whose caches fit beside the weights; 1 where not even that does.

    Bytes that a step reads are taken for those that are held, as they are for sources.
    """
    row = context * sum(layer.token_bytes(context) for layer in layers)
    fit = int(min(max((USABLE * gpu.memory_bytes - weight_bytes) / row, 1), MOST_ROWS))
    return 1 << (fit.bit_length() - 1)


def batches(source: Sequence[Attention], weight_bytes: float, gpu: GPU) -> dict[int, list[int]]:
    """By context: one row, and the most that fit with the source's cache."""
    return {context: sorted({1, largest_batch(source, context, weight_bytes, gpu)}) for context in CONTEXTS}


def speed_against(
    source: Sequence[Attention] | None, layers: Sequence[Attention], rows: dict[int, list[int]], gpu: GPU
) -> list[dict]:
    """Attention of a decoding step by context and batch, plain values.

    Args:
        source: layers of the source; None where it is not known, and nothing is compared.
        rows: batches by context.

    Returns:
        {"context", "batch", "seconds", "bound", "ways"} each, and with a source {"source_seconds", "speedup",
        "bytes_ratio", "faster", "reason"}.
    """
    found = []
    for context, sizes in rows.items():
        for batch in sizes:
            row = {"context": context, "batch": batch}
            after = predict(layers, context, batch, gpu)
            row |= {"seconds": after.seconds, "bound": after.bound, "ways": after.ways}
            if source is not None:
                both = asdict(compare(source, layers, context, batch, gpu))
                row["source_seconds"] = both["source"]["seconds"]
                row |= {name: both[name] for name in ("speedup", "bytes_ratio", "faster", "reason")}
            found.append(row)
    return found
