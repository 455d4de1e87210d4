"""Tokens a second of prefill and of greedy decoding through a model's live cache, beside what the machine allows."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import LongTensor, nn

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes, forward_with_cache, random_tokens
from surgery.eval.logits import evaluation_mode
from surgery.eval.roofline import Ceilings, FlopCount, bound, bytes_read, synchronize


@torch.no_grad()
def measure_speed(
    model: nn.Module,
    context: int,
    batch: int,
    new_tokens: int = 32,
    repeats: int = 3,
    seed: int = 0,
    ceilings: Ceilings | None = None,
) -> dict[str, Any]:
    """Prefills random prompts [batch, context] in one pass, then decodes `new_tokens` more greedily; several times.

    A first run is not timed: it warms up, and its FLOPs and cache are counted for the roofline at `ceilings`. Each
    decoded token is the most likely one, as in generation, and is passed through the model: the token that the prefill
    gives is the first of them.

    Returns:
        {"context", "batch", "prefill_tokens_per_second", "decode_tokens_per_second" (of all sequences together, at the
        median time), "prefill_seconds", "decode_seconds" (one for each repeat), "roofline": what `roofline` gives, None
        without ceilings}.

    Raises:
        SurgeryError: an argument is below 1, or the model returns no cache.
    """
    if min(context, batch, new_tokens, repeats) < 1:
        raise SurgeryError(
            f"cannot time {repeats} repeats of {batch} x {context} tokens and {new_tokens} more: 1 of each is the least"
        )
    prompts = random_tokens(model, batch, context, seed)
    with evaluation_mode(model):
        if ceilings is None:
            limits = None
            _timed_run(model, prompts, new_tokens)
        else:
            limits = roofline(model, prompts, new_tokens, ceilings)
        prefill, decode = zip(*(_timed_run(model, prompts, new_tokens) for _ in range(repeats)), strict=True)
    return {
        "context": context,
        "batch": batch,
        "prefill_tokens_per_second": batch * context / statistics.median(prefill),
        "decode_tokens_per_second": batch * new_tokens / statistics.median(decode),
        "prefill_seconds": list(prefill),
        "decode_seconds": list(decode),
        "roofline": limits,
    }


@torch.no_grad()
def roofline(model: nn.Module, prompts: LongTensor, new_tokens: int, ceilings: Ceilings) -> dict[str, Any]:
    """Runs prompts [B, T] and `new_tokens` more once, and says how fast they could have been; see `eval/roofline.py`.

    Returns:
        {"prefill_tokens_per_second", "decode_tokens_per_second", "bound": "memory" or "compute", what limits
        decoding, "decode_flops", "decode_bytes": of one step of the whole batch, on average}.
    """
    batch, context = prompts.shape
    with FlopCount() as prefill:
        output, cache = forward_with_cache(model, prompts, None)
    filled = cache_bytes(cache)
    with FlopCount() as decode:
        cache = _decode(model, output, cache, new_tokens)
    # A step reads what the steps before it left: the cache grows evenly, or it does not grow.
    read = (filled + cache_bytes(cache)) / 2
    step_bytes, step_flops = bytes_read(model, batch) + read, decode.flops / new_tokens
    prefill_bound = bound(bytes_read(model, batch * context) + filled, prefill.flops, ceilings)
    step = bound(step_bytes, step_flops, ceilings)
    return {
        "prefill_tokens_per_second": batch * context / prefill_bound.seconds,
        "decode_tokens_per_second": batch / step.seconds,
        "bound": step.by,
        "decode_flops": step_flops,
        "decode_bytes": step_bytes,
    }


def _timed_run(model: nn.Module, prompts: LongTensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of the prefill, and of decoding."""
    synchronize(prompts.device)
    start = time.perf_counter()
    output, cache = forward_with_cache(model, prompts, None)
    synchronize(prompts.device)
    prefilled = time.perf_counter()
    _decode(model, output, cache, new_tokens)
    synchronize(prompts.device)
    return prefilled - start, time.perf_counter() - prefilled


def _decode(model: nn.Module, output: Any, cache: Any, new_tokens: int) -> Any:
    """Feeds the most likely next token back `new_tokens` times; returns the last cache."""
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(-1)
        output, cache = forward_with_cache(model, token, cache)
    return cache
