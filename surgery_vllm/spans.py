"""How a batch is cut into pieces that attention reads in one call."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens that requests of one call may have together, each counted as the longest: what is gathered of pages at once, of
# latents as much as stays in a processor's cache. Four times as many take twice as long, each.
GATHERED_TOKENS = 16384
# A call reads every request as if it were the longest, which has at most so many times the tokens of the shortest.
UNEVEN = 1.25
# Requests with more new tokens are read alone: their products are large enough, of the keys that a tile sees only.
SHARED_TOKENS = 16


@dataclass
class Span:
    """Requests of a batch with equally many new tokens and alike in length.

    Attributes:
        tokens: the places of their new tokens in the batch, one request after another; of one request no copy is made.
        pages: [B, ·] pages of each.
        seq_lens: [B] tokens of each, the new ones included.
    """

    tokens: Tensor | slice
    pages: Tensor
    seq_lens: Tensor


def spans_of(query_lens: list[int], block_table: Tensor, seq_lens: Tensor) -> list[Span]:
    """Cuts a batch of requests with so many new tokens each; those without any are left out."""
    lens = seq_lens.tolist()
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    spans = []
    for group in alike(query_lens, lens):
        requests, new = torch.tensor(group), query_lens[group[0]]
        if len(group) == 1:
            first = int(starts[group[0]])
            tokens = slice(first, first + new)
        else:
            tokens = (starts[requests, None] + torch.arange(new)).flatten().to(block_table.device)
        requests = requests.to(block_table.device)
        spans.append(Span(tokens, block_table[requests].long(), seq_lens[requests].long()))
    return spans


def alike(query_lens: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Numbers of the requests of every span, which are read together."""
    groups: list[list[int]] = []
    for new, length, request in sorted(zip(query_lens, seq_lens, range(len(seq_lens)), strict=True)):
        if groups and query_lens[groups[-1][0]] == new <= SHARED_TOKENS:
            even = length <= UNEVEN * seq_lens[groups[-1][0]]
            if even and length * (len(groups[-1]) + 1) <= GATHERED_TOKENS:
                groups[-1].append(request)
                continue
        if new:
            groups.append([request])
    return groups
