"""Attention over packed rows: each document of a row is attended separately, with a separate cache.

See `packed_rows` for how documents are passed to a model.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache

from .cache_argument import CACHE, CACHE_NAMES
from .cache_layer import CacheLayer
from .packed_rows import VARLEN, Spans


class DocumentAttention(nn.Module):
    """Mixin that `family_attention_class` puts before an attention class.

    Attributes:
        new_layer: `compact_caches.new_layer` for this layer; takes `training` and makes an empty cache layer.
        by_token: arguments to slice by token.
        left_out: arguments that are dropped.
    """

    new_layer: Callable[..., CacheLayer]
    by_token: ClassVar[tuple[str, ...]] = ("position_ids", "token_positions")
    left_out: ClassVar[tuple[str, ...]] = (*VARLEN, *CACHE_NAMES)

    def forward(
        self, hidden_states: Tensor, *args: Any, documents: Spans | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run the attention; with `documents`, on each document separately."""
        if documents is None:
            return super().forward(hidden_states, *args, **kwargs)
        batch, length = hidden_states.shape[:2]
        rows = [slice(None)] if len(documents) == 1 else [slice(row, row + 1) for row in range(batch)]
        outputs, weights = [], []
        shared_latents = getattr(self, "shared_latents", None)
        for row, spans in zip(rows, documents, strict=True):
            for span in spans:
                if shared_latents is not None:  # latents are shared within a document
                    self.shared_latents = shared_latents.setdefault((row.start, span.start), {})
                call = self._document_arguments(row, span, kwargs)
                call[CACHE] = self._new_cache()
                out, own = super().forward(hidden_states[row, span], *args, **call)
                outputs.append(out)
                weights.append(own if own is None else pad(own, (span.start, length - span.stop)))
        if shared_latents is not None:
            self.shared_latents = shared_latents
        return _concat(outputs, documents, 1), None if weights[0] is None else _concat(weights, documents, 2)

    def _new_cache(self) -> Cache:
        return Cache(layers=[self.new_layer(training=self.training)] * (self.layer_idx + 1))

    def _document_arguments(self, row: slice, span: slice, kwargs: dict[str, Any]) -> dict[str, Any]:
        call = {name: value for name, value in kwargs.items() if name not in self.left_out}
        for name in self.by_token:
            if call.get(name) is not None:
                call[name] = _cut(call[name], row, span)
        embeddings = call.get("position_embeddings")
        if isinstance(embeddings, Tensor):
            call["position_embeddings"] = _cut(embeddings, row, span)
        elif embeddings is not None:
            call["position_embeddings"] = tuple(each if each is None else _cut(each, row, span) for each in embeddings)
        if call.get("axis_positions") is not None:
            call["axis_positions"] = call["axis_positions"][:, row, span]
        if (mask := call.get("attention_mask")) is not None:
            call["attention_mask"] = _cut(mask, row, slice(None))[..., span, span]
        return call


def _concat(parts: list[Tensor], documents: Spans, dim: int) -> Tensor:
    """Concatenate the documents of each row along `dim`, and then the rows."""
    rows = iter(parts)
    return torch.cat([torch.cat([next(rows) for _ in spans], dim=dim) for spans in documents])


def _cut(tensor: Tensor, row: slice, span: slice) -> Tensor:
    """Slice rows and tokens [·, n, ...] of a tensor [B or 1, T, ...]."""
    return tensor[row if len(tensor) > 1 else slice(None), span]
