"""Division of a batch into spans: requests that attention processes in one call."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate

import torch
from torch import Tensor

# Most tokens of a span, each request counted as the longest. Gathered latents then stay in the CPU's cache; four times
# as many take twice as long per token.
GATHERED_TOKENS = 16384
# Largest ratio of the longest to the shortest request of a span; all are padded to the longest.
UNEVEN = 1.25
# Most new tokens per request in a span of several; with more, a request alone has large enough products, over visible
# keys only.
SHARED_TOKENS = 16


def once(method: Callable) -> Callable:
    """Decorate a method of a span to memoize its result for all layers of a step."""

    @wraps(method)
    def shared(span: "Span", *arguments: int):
        key = (method.__name__, *arguments)
        if key not in span.shared:
            span.shared[key] = method(span, *arguments)
        return span.shared[key]

    return shared


@dataclass
class Span:
    """Requests of a batch with equal numbers of new tokens and similar lengths.

    Sizes and loops depend on host values only. Masks read the lengths on the device, so no layer waits for it.

    Attributes:
        tokens: indices of the new tokens in the batch, request by request; a slice, if contiguous, needs no copy.
        pages: block table [B, ·], as many blocks as the longest request has.
        seq_lens: [B] tokens per request, new ones included.
        page: tokens of a page.
        new: new tokens per request.
        shortest: lower bound of the lengths.
        longest: upper bound of the lengths.
        shared: memo of results for all layers of a step, see :func:`once`.
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
        """Return the causal mask of a tile of queries [B, tile, keys - shortest + new - 1], the same for every tile.

        True hides a key. Columns are the keys after the own key of the shortest request's first query.
        """
        key_offset = torch.arange(1, keys - self.shortest + self.new, device=self.pages.device)
        query_offset = (self.seq_lens - self.shortest)[:, None] + torch.arange(tile, device=self.pages.device)
        return key_offset > query_offset[..., None]

    @once
    def visible(self, first: int, tile: int) -> Tensor:
        """Return the mask [B, 1, tile, longest] of the keys that a tile of queries sees, from new token `first` on."""
        positions = torch.arange(first - self.new, first - self.new + tile, device=self.pages.device)
        queries = self.seq_lens[:, None] + positions
        return (torch.arange(self.longest, device=self.pages.device) <= queries[..., None])[:, None]

    @once
    def table(self) -> tuple[Tensor, Tensor]:
        """Return block table [B, n] and lengths [B] as the kernels take them, int32."""
        return self.pages.to(torch.int32), self.seq_lens.to(torch.int32)

    @once
    def positions(self) -> Tensor:
        """Return the positions [B·longest] of all tokens, request by request."""
        return torch.arange(self.longest, device=self.pages.device).repeat(len(self.pages))

    @once
    def windows(self, sinks: int, recent: int, tile: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each tile of queries the pages [B, ·] that it sees, and the mask [B, t, S] of hidden tokens.

        Args:
            sinks: first tokens that every query sees.
            recent: last tokens that a query sees, its own included.
            tile: queries of a tile; the last tile may have fewer.
        """
        queries = (self.seq_lens - self.new)[:, None] + torch.arange(self.new, device=self.pages.device)  # [B, T]
        return [
            self._window(rows, first, sinks, recent)
            for rows, first in zip(queries.split(tile, 1), range(0, self.new, tile), strict=True)
        ]

    def _window(self, queries: Tensor, first: int, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
        """Return pages and mask for a tile of queries at positions [B, t], beginning at new token `first`."""
        columns = self._columns(queries, first, sinks, recent)
        keys = (columns[..., None] * self.page + torch.arange(self.page, device=queries.device)).flatten(1)
        # Columns past the table may take any page: the mask hides their tokens.
        pages = self.pages.gather(1, columns.clamp(max=self.pages.shape[1] - 1))
        queries, keys = queries[..., None], keys[:, None]
        dropped = (queries - keys >= recent) & (keys >= sinks)
        return pages, dropped | (keys > queries)

    def _columns(self, queries: Tensor, first: int, sinks: int, recent: int) -> Tensor:
        """Return the block table columns [B, ·] that such a tile sees: first of sinks, then of the window, distinct.

        They may include columns after a request's last query.
        """
        sink_columns = min(-(-sinks // self.page), self.pages.shape[1])
        starts = ((queries[:, 0] - recent + 1) // self.page).clamp(min=sink_columns)
        # Most pages that contiguous tokens can touch, wherever they begin, limited to the range of pages that the
        # shortest and the longest request see.
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
    """Divide a batch into spans, without requests that have no new tokens and without a wait for the device.

    Args:
        query_lens: new tokens of every request.
        lengths: tokens of every request on the host, new ones included; exact or upper bounds.
        block_table: [requests, ·] pages of every request.
        seq_lens: [requests] tokens of every request, on the device.
        page: tokens of a page.
        exact: whether `lengths` equal `seq_lens`.
        skip: requests at the front to leave out.
    """
    starts = [0, *accumulate(query_lens)]
    groups = [sorted(group) for group in alike([0] * skip + query_lens[skip:], lengths)]
    scattered = [group for group in groups if group[-1] - group[0] >= len(group)]
    tokens = [[starts[request] + i for request in group for i in range(query_lens[group[0]])] for group in scattered]
    on_device = iter(zip(*[copied(lists, block_table.device) for lists in (scattered, tokens)], strict=True))
    spans = []
    for group in groups:
        first, last, new = group[0], group[-1], query_lens[group[0]]
        requests, span_tokens = slice(first, last + 1), slice(starts[first], starts[last + 1])
        if last - first >= len(group):
            requests, span_tokens = next(on_device)
        shortest = min(lengths[request] for request in group) if exact else new
        longest = max(lengths[request] for request in group)
        pages = block_table[requests, : -(-longest // page)].long()
        spans.append(Span(span_tokens, pages, seq_lens[requests].long(), page, new, shortest, longest))
    return spans


def num_leading_steps(query_lens: list[int]) -> int:
    """Count the leading requests with exactly one new token."""
    return next((index for index, new in enumerate(query_lens) if new != 1), len(query_lens))


def copied(lists: list[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy lists to tensors on a device, in one asynchronous transfer."""
    numbers = [number for numbers in lists for number in numbers]
    on_host = torch.tensor(numbers, dtype=torch.long, device="cpu", pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True).split([len(numbers) for numbers in lists])


def alike(query_lens: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Group requests into spans by new tokens and length; return their indices."""
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
