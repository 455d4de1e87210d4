"""Memory flow of keys and values during a text, and the share of full attention computed: measured on a live model.

A cache that is small once a prompt is read may have been large while it was read, and heads that are called streaming
may still have looked at everything. So three numbers belong together: the bytes that the cache holds while it decodes
(:func:`surgery.eval.kv_cache.measure_kv`), the most that keys and values took on the way there, and the share of full
causal attention that was looked at, the KV footprint of PruLong (Bhaskar et al., arXiv:2506.17121).
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
from surgery.running.attention_tap import AttentionCall, tapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def measure_peak(model: PreTrainedModel, prompt: int, steps: int, chunk: int | None = None) -> int | None:
    """The most bytes that keys and values take while a prompt of random tokens is read and continued, batch 1.

    Looked at after every `update` of a cache layer: what the whole cache holds, and the tensors that this update
    returned as far as they are others, such as dequantized tokens, or a window and new tokens joined.

    Args:
        model: any causal model that returns its cache.
        prompt: tokens of it.
        steps: tokens decoded after it, one by one.
        chunk: tokens of the prompt in one pass; None: all.

    Returns:
        Bytes; None where a cache is filled in another way than by updates of its layers.

    Raises:
        SurgeryError: the model returns no cache.
    """
    past, watch = None, UpdateWatch()
    with evaluation_mode(model), watch.updates():
        for piece in _pieces(model, prompt, steps, chunk):
            _, past = forward_with_cache(model, piece, past)
    return watch.peak if watch.held == cache_bytes(past) else None


@torch.no_grad()
def measure_footprint(model: PreTrainedModel, prompt: int, steps: int, chunk: int | None = None) -> float | None:
    """Pairs of a query of one head and a key that it could see, over those of full causal attention.

    Over the whole of reading a prompt and decoding; arguments and errors as of `measure_peak`.

    Returns:
        The share; None where the model's attention takes no function of ours.
    """
    counter, past = EntryCounter(), None
    pieces = _pieces(model, prompt, steps, chunk)
    try:
        with evaluation_mode(model), tapped(model, counter):
            for piece in pieces:
                _, past = forward_with_cache(model, piece, past)
    except (SurgeryError, AttributeError):
        return None
    full = model.config.num_hidden_layers * model.config.num_attention_heads * causal_entries(prompt + steps)
    return counter.entries / full


def _pieces(model: PreTrainedModel, prompt: int, steps: int, chunk: int | None) -> list[LongTensor]:
    chunk = prompt if chunk is None else chunk
    tokens = random_tokens(model, 1, prompt + steps)
    return [*tokens[:, :prompt].split(chunk, dim=1), *tokens[:, prompt:].split(1, dim=1)]


def causal_entries(tokens: int) -> int:
    """Pairs of a query and a key that it sees in one head of full causal attention."""
    return tokens * (tokens + 1) // 2


@dataclass
class EntryCounter:
    """An attention function for `tapped` that counts the pairs of a query of one head and a key that it may see.

    Attributes:
        entries: so far.
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
    """Bytes of all cache layers that are updated while `updates` is open.

    Attributes:
        peak: the most that they held at an update, with what it returned.
    """

    peak: int = 0
    _layers: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _last: Any = None
    _depth: int = 0

    @property
    def held(self) -> int:
        """Bytes that the layers hold now."""
        return sum(cache_bytes(layer) for layer, _ in self._layers.values())

    @contextmanager
    def updates(self) -> Iterator[None]:
        """Watches every update of a cache layer of any class."""
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
            if not self._depth:  # a layer may call that of another inside
                self._note(layer, returned)
            return returned

        return inner

    def _note(self, layer: Any, returned: Any) -> None:
        if self._last is not None:
            # What a layer lends to the attention of this pass only is given back by now.
            self._layers[id(self._last)] = self._last, cache_bytes(self._last)
        self._layers[id(layer)] = layer, cache_bytes([layer, returned])  # kept alive, so that no other gets its id
        self._last = layer
        self.peak = max(self.peak, sum(size for _, size in self._layers.values()))


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
