"""Peak KV memory and KV footprint, measured on a live model.

A cache that is small after prefill may have been large during prefill, and streaming heads may still have attended to
the full context. Three figures therefore belong together: the cache bytes while decoding
(:func:`surgery.eval.kv_cache.measure_kv`), the peak bytes of keys and values, and the share of full causal attention
that was computed, which is the KV footprint of PruLong (Bhaskar et al., arXiv:2506.17121).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import LongTensor
from transformers.cache_utils import CacheLayerMixin

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes, forward_with_cache, random_tokens
from surgery.eval.logits import evaluation_mode
from surgery.running.attention_tap import AttentionCall, tap_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def measure_peak(model: PreTrainedModel, prompt: int, steps: int, chunk: int | None = None) -> int | None:
    """Measure the peak bytes of keys and values while a random prompt is prefilled and continued, batch size 1.

    Sampled after every `update` of a cache layer: the bytes of the whole cache plus the returned tensors that do not
    share its storage, such as dequantized tokens or a window concatenated with new tokens.

    Args:
        model: causal model that returns its cache.
        prompt: number of prompt tokens.
        steps: number of tokens decoded one by one after the prompt.
        chunk: prompt tokens per forward pass; None prefills in one pass.

    Returns:
        Bytes; None if the cache is not filled through the `update` of its layers.

    Raises:
        SurgeryError: the model returns no cache.
    """
    past, watch = None, UpdateWatch()
    with evaluation_mode(model), watch.updates():
        for piece in _pieces(model, prompt, steps, chunk or prompt):
            _, past = forward_with_cache(model, piece, past)
    return watch.peak if watch.held == cache_bytes(past) else None


@torch.no_grad()
def measure_footprint(model: PreTrainedModel, prompt: int, steps: int) -> float | None:
    """Measure the share of full causal attention's query-key pairs that are visited, for `measure_peak`'s tokens.

    None if the attention of the model cannot be replaced, or the model returns no cache.
    """
    counter, past = EntryCounter(), None
    try:
        with evaluation_mode(model), tap_attention(model, counter):
            for piece in _pieces(model, prompt, steps, prompt):
                _, past = forward_with_cache(model, piece, past)
    except SurgeryError:
        return None
    full = model.config.num_hidden_layers * model.config.num_attention_heads * causal_entries(prompt + steps)
    return counter.entries / full


def _pieces(model: PreTrainedModel, prompt: int, steps: int, chunk: int) -> list[LongTensor]:
    tokens = random_tokens(model, 1, prompt + steps)
    return [*tokens[:, :prompt].split(chunk, dim=1), *tokens[:, prompt:].split(1, dim=1)]


def causal_entries(tokens: int) -> int:
    """Count the query-key pairs of one head of full causal attention."""
    return tokens * (tokens + 1) // 2


@dataclass
class EntryCounter:
    """Attention function for `tap_attention` that counts the visible query-key pairs over all query heads.

    Attributes:
        entries: pairs counted so far.
    """

    entries: int = 0

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        visible = call.visible()
        if visible.dtype != torch.bool:
            visible = visible > torch.finfo(visible.dtype).min / 2
        per_row = call.query.shape[1] if visible.shape[1] == 1 else call.query.shape[1] // visible.shape[1]
        self.entries += int(visible.sum()) // visible.shape[0] * per_row
        return call.output()


@dataclass
class UpdateWatch:
    """Recorder of the bytes of all cache layers that are updated while `updates` is open.

    Attributes:
        peak: maximum bytes over all updates, including the tensors that the update returned.
    """

    peak: int = 0
    _layers: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _last: Any = None
    _depth: int = 0

    @property
    def held(self) -> int:
        """Current bytes of the updated layers."""
        return sum(cache_bytes(layer) for layer, _ in self._layers.values())

    @contextmanager
    def updates(self) -> Iterator[None]:
        """Patch the `update` method of every cache layer class to record bytes."""
        original = {cls: cls.__dict__["update"] for cls in _subclasses(CacheLayerMixin) if "update" in cls.__dict__}
        for cls, update in original.items():
            cls.update = self._watched(update)
        try:
            yield
        finally:
            for cls, update in original.items():
                cls.update = update

    def _watched(self, update: Callable) -> Callable:
        @wraps(update)
        def inner(layer: Any, *args, **kwargs):
            self._depth += 1
            try:
                returned = update(layer, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:  # an update may call the update of another layer
                self._note(layer, returned)
            return returned

        return inner

    def _note(self, layer: Any, returned: Any) -> None:
        if self._last is not None:
            # The previous layer has freed by now the tensors that it returned to attention.
            self._layers[id(self._last)] = self._last, cache_bytes(self._last)
        self._layers[id(layer)] = layer, cache_bytes([layer, returned])  # a reference keeps the id unique
        self._last = layer
        self.peak = max(self.peak, sum(size for _, size in self._layers.values()))


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
