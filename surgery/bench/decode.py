"""``surgery bench decode``: decode throughput and peak memory of whole models, source next to converted.

All models run one greedy loop over a randomly filled cache (:mod:`surgery.bench.cache`): each step reads the most
likely token of the previous one. Plain caches and packed rows have a fixed number of tokens, others grow as in use.
Steps are timed as launched from Python. On a GPU a step over a cache of fixed length is also captured in a CUDA graph
and replayed, which excludes Python overhead. Both times are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from surgery.bench import models as bench_models
from surgery.bench.cache import filled_cache, is_steady
from surgery.bench.shapes import is_shape
from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.eval.memory import OutOfMemory, free_memory, unless_out_of_memory
from surgery.eval.session import synchronize
from surgery.eval.tensor_bytes import weight_bytes
from surgery.kernels.bench.measure import device_facts
from surgery.kernels.bench.run import versions, write_json
from surgery.model.cache_argument import CACHE
from surgery.running.models import causal_model
from surgery.running.source_check import open_source
from surgery.running.unfused import language_model

SCHEMA = 1
STEPS = 8
REPEATS = 3
MOST_ROWS = 512
USABLE = 0.9
"""Maximum share of free memory for the caches of the largest batch."""


@dataclass(frozen=True)
class Subject:
    """Model to measure: source, a target of `--to`, or checkpoint; ``build`` loads or creates it on a device.

    ``source`` is the name of the source that it is compared with; of several folders that is the first.
    """

    name: str
    kind: str
    build: Callable[[torch.device], Any]
    source: str


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of a decode benchmark.

    Attributes:
        contexts: tokens in the cache.
        batches: batch sizes; None for the largest that fits.
        rank, rope_dim: latent rank and rotary dimensions of converted models of a named shape.
        structures: conversion targets for named shapes.
        kernels: variants to measure in turn: without (False) and with (True) Triton kernels.
        seconds: time limit after which no further measurement starts.
        growing: whether caches grow with every step, as in `generate`.
    """

    contexts: tuple[int, ...]
    batches: tuple[int | None, ...]
    rank: int = 512
    rope_dim: int = 64
    structures: tuple[str, ...] = ("mla",)
    kernels: tuple[bool, ...] = (False, True)
    seconds: float = float("inf")
    dtype: str = "auto"
    growing: bool = False


def subjects(names: Sequence[str], settings: DecodeSettings) -> Iterator[Subject]:
    """Yield source and converted models for named shapes, and checkpoints for folders.

    Raises SurgeryError: a name that is neither a folder nor a shape, or an unknown structure.
    """
    configs = bench_models.converted_configs()
    for structure in settings.structures:
        if structure not in configs:
            raise SurgeryError(f"--to {structure}: unknown; choose from {', '.join(configs)}")
    folders = [name for name in names if not is_shape(name)]
    readers = [language_model(open_source(name)) for name in folders]
    for number, reader in enumerate(readers):
        kind, source = "checkpoint" if number or len(readers) == 1 else "source", readers[0].name
        yield Subject(reader.name, kind, lambda at, r=reader: causal_model(r, dtype=settings.dtype).to(at), source)
    for name in names:
        if name in folders:
            continue
        config = bench_models.source_config(name)
        yield Subject(name, "source", lambda at, c=config: bench_models.random_model(c, at), name)
        for structure in settings.structures:
            result = configs[structure](config, settings.rank, settings.rope_dim)
            yield Subject(name, structure, lambda at, c=result: bench_models.random_model(c, at), name)


def measure_decoding(
    names: Sequence[str],
    settings: DecodeSettings,
    device: torch.device,
    *,
    out: Path | None = None,
    command: str = "",
    say: Callable[[str], Any] = lambda line: None,
) -> dict:
    """Measure all subjects, plain and accelerated; write the record to `out` after each row.

    Raises SurgeryError: an unknown name or structure.
    """
    began = time.monotonic()
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "device": device_facts(device),
        "versions": {**versions(), "transformers": transformers.__version__},
        "cache": "random tokens; grows with every step"
        if settings.growing
        else "random values or tokens at the full context; plain caches and packed rows stay at that length",
        "note": None if device.type == "cuda" else "measured on a CPU; not representative of a GPU",
        "rows": [],
    }
    for subject in list(subjects(names, settings)):
        for accelerated in settings.kernels:
            if time.monotonic() - began > settings.seconds:
                record["note"] = f"stopped after {settings.seconds:.0f} s: not everything was measured"
                break
            for row in _rows(subject, accelerated, settings, device, began):
                record["rows"].append(row)
                _against_source(record["rows"])
                say(_line(row))
                if out is not None:
                    write_json(out, record)
    if out is not None:
        write_json(out, record)
    return record


@torch.no_grad()
def _rows(
    subject: Subject, accelerated: bool, settings: DecodeSettings, device: torch.device, began: float
) -> Iterator[dict]:
    common = {"model": subject.name, "kind": subject.kind, "source": subject.source, "accelerated": accelerated}
    model = unless_out_of_memory(lambda: subject.build(device))
    if isinstance(model, OutOfMemory):
        yield {**common, "skipped": "the weights do not fit into memory"}
        return
    common["weight_bytes"] = weight_bytes(model)
    try:
        if accelerated:
            from surgery.acceleration import accelerate

            acceleration = accelerate(model)
            if acceleration.refused:
                yield {**common, "skipped": acceleration.refused}
                return
            common |= {"layers": sorted(set(acceleration.layers)), "logit_error": acceleration.error}
        for context in settings.contexts:
            at, batches = {**common, "context": context}, set()
            for batch in settings.batches:
                if time.monotonic() - began > settings.seconds:
                    return
                row = _row(model, at, batch, device, batches, settings.growing)
                if row is not None:
                    yield row
    except (ImportError, SurgeryError, ValueError) as error:
        yield {**common, "skipped": " ".join(str(error).split())[:200]}
    finally:
        del model
        free_memory()


def _row(
    model: Any, common: dict, requested: int | None, device: torch.device, batches: set[int], growing: bool
) -> dict | None:
    """Measure one batch size, the largest that fits for None; return None if it was measured already."""
    batch = requested or _largest(model, common["context"], device)
    while batch not in batches:
        batches.add(batch)
        measurement = unless_out_of_memory(partial(_measure, model, batch, common["context"], device, growing))
        free_memory()
        if not isinstance(measurement, OutOfMemory):
            return {**common, "batch": batch, "largest": requested is None, **measurement}
        if requested is not None or batch == 1:
            return {**common, "batch": batch, "largest": requested is None, "skipped": "out of memory"}
        batch = max(1, batch * 3 // 4)
    return None


def _largest(model: Any, context: int, device: torch.device) -> int:
    """Estimate the largest batch whose caches fit next to the weights."""
    free_memory()
    short = min(context, 256)  # a window, or a group of tokens that are quantized together, is full by then
    row = cache_bytes(filled_cache(model, 1, short, device)) / short * context
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
    return int(min(max(USABLE * free / row, 1), MOST_ROWS))


def _measure(model: Any, batch: int, context: int, device: torch.device, growing: bool) -> dict:
    # Memory for two warm-up steps and the timed ones.
    steady = not growing and is_steady(model, device)
    cache = filled_cache(model, batch, context, device, 2 + REPEATS * STEPS, growing=growing)
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    position = torch.full((batch, 1), context, dtype=torch.long, device=device)
    where = {"position_ids": position} if steady else {}  # a growing cache tracks positions itself
    kv_bytes = cache_bytes(cache)

    def step() -> None:
        out = model(input_ids=token, use_cache=True, logits_to_keep=1, **where, **{CACHE: cache})
        token.copy_(out.logits[:, -1:].argmax(-1))

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step(), step()
    eager = _seconds(step, device)
    replayed, refused = _graph_seconds(step, device) if steady else (None, "the cache grows")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    best = min(filter(None, (eager, replayed)))
    return {
        "cache_bytes": kv_bytes,
        "peak_memory_bytes": peak,
        "step_seconds": eager,
        "graph_step_seconds": replayed,
        "graph_refused": refused,
        "tokens_per_second": batch / best,
    }


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds per step over `REPEATS` runs of `STEPS` steps; two steps per run on a CPU."""
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(STEPS if device.type == "cuda" else 2):
            step()
        synchronize(device)
        times.append((time.perf_counter() - start) / (STEPS if device.type == "cuda" else 2))
    return statistics.median(times)


def _graph_seconds(step: Callable[[], Any], device: torch.device) -> tuple[float | None, str | None]:
    """Return the seconds of a replayed step, or None and the reason why capture failed."""
    if device.type != "cuda":
        return None, "no GPU"
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step(), step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        synchronize(device)
        return None, " ".join(str(error).split())[:120]
    graph.replay()
    return _seconds(graph.replay, device), None


def _against_source(rows: list[dict]) -> None:
    """Add to each row its throughput relative to the fastest source run at the same context and batch."""
    measured = [row for row in rows if "tokens_per_second" in row]
    fastest: dict[tuple, float] = {}
    for row in measured:
        if row["kind"] == "source":
            fastest[_measurement_key(row)] = max(fastest.get(_measurement_key(row), 0.0), row["tokens_per_second"])
    for row in measured:
        if source := fastest.get(_measurement_key(row)):
            row["times_source"] = row["tokens_per_second"] / source


def _measurement_key(row: dict) -> tuple:
    return row["source"], row["context"], "largest" if row["largest"] else row["batch"]


def _line(row: dict) -> str:
    how = "accelerated" if row["accelerated"] else "unchanged"
    label = f"{row['model']} {row['kind']}, {how}"
    if "context" in row:
        label += f", context {row['context']}, batch {row.get('batch')}"
    if "skipped" in row:
        return f"{label}: skipped, {row['skipped']}"
    return f"{label}: {row['tokens_per_second']:,.0f} tokens/s"
