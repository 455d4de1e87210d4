"""Which cases there are: operations × models × variants × contexts × batches × dtypes, the telling ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest

import torch

from surgery.kernels.bench.case import MODELS, Case
from surgery.kernels.bench.operations.gqa_decode import GQADecode
from surgery.kernels.bench.operations.hybrid_decode import HybridDecode
from surgery.kernels.bench.operations.lowrank_decode import LowRankDecode
from surgery.kernels.bench.operations.mla_decode import MLADecode
from surgery.kernels.bench.operations.mla_prefill import MLAPrefill
from surgery.kernels.bench.operations.quantized_decode import BITS, GQADecodeQuantized, MLADecodeQuantized
from surgery.kernels.bench.operations.sink_recent_prefill import SinkRecentPrefill

MOST_PREFILL = 32_768
"""Tokens of a prompt: longer ones take seconds a call."""

GROUP = 32
"""Tokens of a channel, or channels of a token, that share a scale; what is quantised is whole groups."""


def _mla(place: dict) -> Iterator[Case]:
    sizes = ((48, 16),) if place["model"] == "tiny" else ((512, 64), (256, 64), (128, 64))
    return (MLADecode(**place, rank=rank, rope=rope) for rank, rope in sizes)


def _gqa(place: dict) -> Iterator[Case]:
    yield GQADecode(**place)


def _lowrank(place: dict) -> Iterator[Case]:
    """A quarter of the KV bytes in latents for one, two and all KV heads."""
    shape = place["shape"]
    for served in sorted({1, min(2, shape.kv_heads), shape.kv_heads}):
        yield LowRankDecode(**place, rank=served * shape.head_dim // 2, served=served)


def _hybrid(place: dict) -> Iterator[Case]:
    tiny = place["model"] == "tiny"
    sinks, recent = (4, 12) if tiny else (64, 256)
    if place["context"] > sinks + recent:
        yield HybridDecode(**place, full=place["shape"].kv_heads // 2, sinks=sinks, recent=recent)


def _mla_quantized(place: dict) -> Iterator[Case]:
    tiny = place["model"] == "tiny"
    whole = {**place, "context": place["context"] // GROUP * GROUP}
    for format in BITS:
        for rank, rope in ((48, 16),) if tiny else ((512, 64), (256, 64)):
            if whole["context"]:
                yield MLADecodeQuantized(**whole, format=format, group=GROUP, rank=rank, rope=rope)


def _gqa_quantized(place: dict) -> Iterator[Case]:
    whole = {**place, "context": place["context"] // GROUP * GROUP}
    for format in BITS:
        if whole["context"]:
            yield GQADecodeQuantized(**whole, format=format, group=GROUP)


def _prefill(place: dict) -> Iterator[Case]:
    if place["batch"] * place["context"] <= MOST_PREFILL:
        width = place["shape"].head_dim
        yield MLAPrefill(**place, key_dim=width + width // 2, value_dim=width)
        yield MLAPrefill(**place, key_dim=width, value_dim=width)


def _sink_recent(place: dict) -> Iterator[Case]:
    if place["batch"] * place["context"] <= MOST_PREFILL:
        sinks, recent = (4, 12) if place["model"] == "tiny" else (64, 256)
        full = place["shape"].kv_heads // 2
        yield SinkRecentPrefill(**place, full=full, sinks=sinks, recent=recent)


OPERATIONS: dict[str, Callable[[dict], Iterator[Case]]] = {
    "mla_decode": _mla,
    "gqa_decode": _gqa,
    "lowrank_decode": _lowrank,
    "hybrid_decode": _hybrid,
    "mla_decode_quantized": _mla_quantized,
    "gqa_decode_quantized": _gqa_quantized,
    "mla_prefill": _prefill,
    "sink_recent_prefill": _sink_recent,
}
"""Operations by name, with what lists the cases of one at a place."""


def cases(
    operations: Iterable[str],
    models: Iterable[str],
    contexts: Iterable[int],
    batches: Iterable[int],
    dtypes: Iterable[torch.dtype],
) -> list[Case]:
    """All cases, operations taking turns: whenever a run is stopped, each has some results.

    Of every operation the largest decoding steps come first, where the targets are and launches do not matter.

    Raises:
        ValueError: an operation or a model that there is not.
    """
    operations, models = list(operations), list(models)
    for what, given, known in (("operation", operations, OPERATIONS), ("shape", models, MODELS)):
        for name in given:
            if name not in known:
                raise ValueError(f"unknown {what} {name!r}: choose {', '.join(known)}")
    places = [
        {"model": model, "batch": batch, "context": context, "dtype": dtype, "shape": MODELS[model]}
        for dtype in dtypes
        for context, batch in sorted(
            ((context, batch) for context in contexts for batch in batches), key=lambda at: -at[0] * at[1]
        )
        for model in models
    ]
    each = [[case for place in places for case in OPERATIONS[name](place)] for name in operations]
    return [case for turn in zip_longest(*each) for case in turn if case is not None]
