"""Chunked losses: sums over the logits of many positions, with the logits of one chunk in memory at a time.

The fp32 logits of 8k positions over a vocabulary of 128k take 4 GB, and a loss makes several tensors of that size. So
positions are processed in chunks, and the backward pass recomputes the logits of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGIT_BYTES = 256 * 2**20
"""Bytes of one chunk's fp32 logits of one model: 523 positions of 128,256 tokens. A loss needs a few times as much per
chunk: log-probabilities of student and teacher, and their gradients."""


class States(NamedTuple):
    """Final hidden states [N, D] of a model after the final norm, in any floating dtype, with its LM head.

    The head is called, not read for its weight, so that hooks that gather sharded weights work.
    """

    hidden: Tensor
    head: nn.Module

    def logits(self) -> Tensor:
        """Compute logits [N, V] in fp32, or in fp64 if the head returns fp64."""
        logits = self.head(self.hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def vocabulary(self) -> int:
        """Return the vocabulary size V, from the head's shape where it has one, else from the logits of a position."""
        features = getattr(self.head, "out_features", None)
        return features if isinstance(features, int) else self._replace(hidden=self.hidden[:1]).logits().shape[-1]


def chunk_count(positions: int, vocabulary: int, max_bytes: int = LOGIT_BYTES) -> int:
    """Return the number of chunks, of at least one position, with fp32 logits [chunk, V] within ``max_bytes``."""
    rows = max(1, max_bytes // (4 * vocabulary))
    return max(1, -(-positions // rows))


def summed_over_chunks(function: Callable[..., Tensor], columns: Sequence[Tensor], chunks: int) -> Tensor:
    """Sum ``function`` over chunks of ``columns`` [N, …], with gradients if they are enabled.

    Several chunks are checkpointed: the backward pass calls ``function`` again. It gets one chunk of every column,
    which may be empty, and returns a tensor of the same shape for each.
    """
    pieces = zip(*(column.tensor_split(chunks) for column in columns), strict=True)
    if chunks == 1 or not torch.is_grad_enabled():
        sums = [function(*piece) for piece in pieces]
    else:
        sums = [checkpoint(function, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(sums).sum(0)
