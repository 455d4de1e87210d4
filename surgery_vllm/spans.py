"""Batches cut into spans: requests that attention reads in one call, with all that the layers of a step share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate

import torch
from torch import Tensor

# Tokens that requests of one call may have together, each counted as the longest: what is gathered of pages at once, of
# latents as much as stays in a processor's cache. Four times as many take twice as long, each.
GATHERED_TOKENS = 16384
# A call reads every request as if it were the longest, which has at most so many times the tokens of the shortest.
UNEVEN = 1.25
# Requests with more new tokens are read alone: their products are large enough, of the keys that a tile sees only.
SHARED_TOKENS = 16


def once(method: Callable) -> Callable:
    """Decorate a method of a span: the first layer of a step computes the result, the others reuse it."""

    @wraps(method)
    def shared(span: "Span", *arguments: int):
        key = (method.__name__, *arguments)
        if key not in span.shared:
            span.shared[key] = method(span, *arguments)
        return span.shared[key]

    return shared


@dataclass
class Span:
    """Requests of a batch with equally many new tokens and alike in length.

    Sizes and loops follow numbers that the host has; only masks read the lengths on the device, so no layer waits for
    it.

    Attributes:
        tokens: indices of their new tokens in the batch, one request after another; neighbors need no copy.
        pages: [B, ·] pages of each, as many as the longest has.
        seq_lens: [B] tokens of each, the new ones included.
        page: tokens of a page.
        new: new tokens of each.
        shortest: lower bound of the lengths.
        longest: upper bound of the lengths.
        shared: results for all layers of a step, see :func:`once`.
    """

    tokens: Tensor | slice
    pages: Tensor
    seq_lens: Tensor
    page: int
    new: int
    shortest: int
    longest: int
    shared: dict = field(default_factory=dict)

    @once
    def hidden(self, keys: int, tile: int) -> Tensor:
        """Causal mask of a tile of queries [B, tile, keys - shortest + new - 1], the same for every tile.

        Its columns are the keys after the first query's own, of the shortest request.
        """
        behind = torch.arange(1, keys - self.shortest + self.new, device=self.pages.device)
        place = (self.seq_lens - self.shortest)[:, None] + torch.arange(tile, device=self.pages.device)
        return behind > place[..., None]

    @once
    def positions(self) -> Tensor:
        """Positions [B·longest] of the tokens of every request, one request after another."""
        return torch.arange(self.longest, device=self.pages.device).repeat(len(self.pages))

    @once
    def windows(self, sinks: int, recent: int, tile: int) -> list[tuple[Tensor, Tensor]]:
        """Pages [B, ·] that each tile of queries sees, and the mask [B, t, S] of their tokens.

        Args:
            sinks: first tokens that every query sees.
            recent: last tokens that a query sees, its own among them.
            tile: queries of a tile, the last one's may be fewer.
        """
        queries = (self.seq_lens - self.new)[:, None] + torch.arange(self.new, device=self.pages.device)  # [B, T]
        return [
            self._window(rows, first, sinks, recent)
            for rows, first in zip(queries.split(tile, 1), range(0, self.new, tile), strict=True)
        ]

    def _window(self, queries: Tensor, first: int, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
        """Pages and mask for a tile of queries at positions [B, t], from new token `first` of every request on."""
        columns = self._columns(queries, first, sinks, recent)
        keys = (columns[..., None] * self.page + torch.arange(self.page, device=queries.device)).flatten(1)
        # Of a column past the table any page does: its tokens are none of the request's.
        pages = self.pages.gather(1, columns.clamp(max=self.pages.shape[1] - 1))
        queries, keys = queries[..., None], keys[:, None]
        dropped = (queries - keys >= recent) & (keys >= sinks)
        return pages, dropped | (keys > queries)

    def _columns(self, queries: Tensor, first: int, sinks: int, recent: int) -> Tensor:
        """Columns [B, ·] of the block table that such a tile sees: sinks' first, then the window's, none twice.

        Columns behind a request's last query may be among them.
        """
        sink_columns = min(-(-sinks // self.page), self.pages.shape[1])
        starts = ((queries[:, 0] - recent + 1) // self.page).clamp(min=sink_columns)
        # So many neighboring tokens lie in at most so many pages, wherever the first one begins; and none of them
        # outside what the shortest and the longest request see.
        tokens = queries.shape[1] + recent - 1
        earliest = (self.shortest - self.new + first - recent + 1) // self.page
        latest = (self.longest - self.new + first + queries.shape[1] - 1) // self.page
        count = min(-(-(tokens - 1) // self.page), latest - max(earliest, sink_columns)) + 1
        window = starts[:, None] + torch.arange(max(count, 0), device=queries.device)
        sink = torch.arange(sink_columns, device=queries.device).expand(len(queries), -1)
        return torch.cat((sink, window), dim=1)


def spans_of(
    query_lens: list[int],
    lengths: list[int],
    block_table: Tensor,
    seq_lens: Tensor,
    page: int,
    exact: bool = True,
    skip: int = 0,
) -> list[Span]:
    """Cuts a batch into spans; requests without new tokens are left out. Nothing here waits for the device.

    Args:
        query_lens: new tokens of every request.
        lengths: tokens of every request as the host knows them, the new ones included: no fewer than there are.
        block_table: [requests, ·] pages of every request.
        seq_lens: [requests] tokens of every request, on the device.
        page: tokens of a page.
        exact: `lengths` are those on the device.
        skip: requests at the front that are left out.
    """
    starts = [0, *accumulate(query_lens)]
    groups = [sorted(group) for group in alike([0] * skip + query_lens[skip:], lengths)]
    scattered = [group for group in groups if group[-1] - group[0] >= len(group)]
    tokens = [[starts[request] + i for request in group for i in range(query_lens[group[0]])] for group in scattered]
    on_device = iter(zip(*[copied(lists, block_table.device) for lists in (scattered, tokens)], strict=True))
    spans = []
    for group in groups:
        first, last, new = group[0], group[-1], query_lens[group[0]]
        requests, places = slice(first, last + 1), slice(starts[first], starts[last + 1])
        if last - first >= len(group):
            requests, places = next(on_device)
        shortest = min(lengths[request] for request in group) if exact else new
        longest = max(lengths[request] for request in group)
        pages = block_table[requests, : -(-longest // page)].long()
        spans.append(Span(places, pages, seq_lens[requests].long(), page, new, shortest, longest))
    return spans


def steps_in_front(query_lens: list[int]) -> int:
    """Count the requests with one new token before the first with more, or with none."""
    return next((place for place, new in enumerate(query_lens) if new != 1), len(query_lens))


def copied(lists: list[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """A tensor on a device for each of some lists, in one copy that the host does not wait for."""
    numbers = [number for numbers in lists for number in numbers]
    on_host = torch.tensor(numbers, dtype=torch.long, device="cpu", pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True).split([len(numbers) for numbers in lists])


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
