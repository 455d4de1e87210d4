"""How a batch is cut into pieces that attention reads in one call."""

from dataclasses import dataclass

# Tokens that requests of one call may have together, each counted as the longest: what is gathered of pages at once.
GATHERED_TOKENS = 65536


@dataclass
class Span:
    """Neighbouring requests of a batch with equally many new tokens."""

    requests: slice
    tokens: slice


def spans_of(query_lens: list[int], seq_lens: list[int]) -> list[Span]:
    """Cuts a batch into runs of requests with equally many new tokens; requests without any are left out."""
    spans, first, token = [], 0, 0
    while first < len(query_lens):
        new, longest, last = query_lens[first], seq_lens[first], first + 1
        while last < len(query_lens) and query_lens[last] == new:
            longest = max(longest, seq_lens[last])
            if longest * (last + 1 - first) > GATHERED_TOKENS:
                break
            last += 1
        end = token + new * (last - first)
        if new:
            spans.append(Span(slice(first, last), slice(token, end)))
        first, token = last, end
    return spans
