"""Sums over the logits of many positions, of which only a few positions' logits exist at one time.

The fp32 logits of 8k positions over a vocabulary of 128k take 4 GB, and a loss makes several tensors of that size. So
positions go in chunks, and a chunk's logits are made again in the backward pass instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from surgery.common.errors import SurgeryError

LOGIT_BYTES = 256 * 2**20
"""Bytes of one chunk's fp32 logits of one model: 523 positions of 128,256 tokens. A loss takes a few times as much
while it works on a chunk: log-probabilities of student and teacher, and their gradients."""

Head = nn.Module | Tensor | Callable[[Tensor], Tensor]
"""Makes logits [N, V] of hidden states [N, D]: a module, a weight [V, D], or a function (a softcap after a head)."""


class States(NamedTuple):
    """Hidden states of a model at N positions before its head.

    Attributes:
        hidden: [N, D] final hidden states, after the last norm, in any floating dtype.
        head: what makes logits of them. A module is called as one, so that hooks which gather sharded weights (FSDP,
            ZeRO-3) and adapters in it work.
    """

    hidden: Tensor
    head: Head

    def logits(self) -> Tensor:
        """[N, V] in fp32, or fp64 if the head gives that."""
        logits = linear(self.hidden, self.head) if isinstance(self.head, Tensor) else self.head(self.hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def vocabulary(self) -> int:
        """V, without making logits where the head tells."""
        if isinstance(self.head, Tensor):
            return self.head.shape[0]
        features = getattr(self.head, "out_features", None)
        return features if isinstance(features, int) else self._replace(hidden=self.hidden[:1]).logits().shape[-1]


def chunk_count(positions: int, vocabulary: int, max_bytes: int = LOGIT_BYTES) -> int:
    """Return how many chunks keep the fp32 logits [chunk, V] of each within ``max_bytes``, or at one position.

    Raises:
        SurgeryError: ``max_bytes`` is not positive.
    """
    if max_bytes < 1:
        raise SurgeryError(f"logits in {max_bytes} bytes: a positive budget is needed")
    rows = max(1, max_bytes // (4 * vocabulary))
    return max(1, -(-positions // rows))


def summed_over_chunks(function: Callable[..., Tensor], columns: Sequence[Tensor], chunks: int) -> Tensor:
    """The sum of ``function`` over pieces of ``columns``, with gradients if they are enabled.

    Several chunks keep nothing for the backward pass, which calls ``function`` on them again; a single one is computed
    once, as it stands.

    Args:
        function: of one piece of every column; gives a tensor of one shape for each, also of no rows.
        columns: tensors [N, …].
        chunks: in how many pieces they go, of equal length but for one row. Some are empty where N is smaller.
    """
    pieces = zip(*(column.tensor_split(chunks) for column in columns), strict=True)
    if chunks == 1 or not torch.is_grad_enabled():
        sums = [function(*piece) for piece in pieces]
    else:
        sums = [checkpoint(function, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(sums).sum(0)
