"""Format of the packed row of a token in a quantized cache: the bits of each channel and their location.

Every token has one row of a fixed size, so that a cache of rows can be cropped, reordered, shared by prefix and written
in any chunks. A row is a sequence of runs. All bytes of a run have the same bit fields, the first in the lowest bits;
field f of byte b is channel `f * bytes + b` of the run. So adjacent channels lie in adjacent bytes, and one mask turns
a 16-bit lane into two fp16 values. No torch here.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from dataclasses import dataclass

PATTERNS: dict[str, tuple[int, ...]] = {
    "8": (8,),
    "5+3": (5, 3),
    "4+4": (4, 4),
    "3+3+2": (3, 3, 2),
    "2+2+2+2": (2, 2, 2, 2),
    "8x1": (1,) * 8,
}
"""Bits of the fields of a byte. Fractional levels would save 1% of the loss at three times the instructions."""

GAIN_BYTES = 2
"""Bytes of one gain, the fp16 inverse rms of a KV head's key; gains follow the packed values in a row."""

Runs = tuple[tuple[str, int], ...]
"""Pairs of a pattern and its number of bytes."""


@dataclass(frozen=True)
class TokenFormat:
    """Layout of a packed row."""

    runs: Runs

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return sum(count for _, count in self.runs)

    @property
    def channels(self) -> int:
        """Number of values of a row."""
        return sum(count * len(PATTERNS[pattern]) for pattern, count in self.runs)

    def fields(self) -> list[tuple[int, int, int, int]]:
        """Return first byte, number of bytes, lowest bit and bits of every field, in channel order."""
        fields, start = [], 0
        for pattern, count in self.runs:
            position = 0
            for bits in PATTERNS[pattern]:
                fields.append((start, count, position, bits))
                position += bits
            start += count
        return fields

    def layout(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the channel of every field of every byte [fields][bytes], and the factor that shifts its code.

        Missing fields of a byte have factor 0.
        """
        num_runs = max((len(PATTERNS[pattern]) for pattern, _ in self.runs), default=1)
        channels, factors = ([[0] * self.row_bytes for _ in range(num_runs)] for _ in range(2))
        channel, counts = 0, [0] * self.row_bytes
        for start, count, position, _ in self.fields():
            for byte in range(start, start + count):
                channels[counts[byte]][byte], factors[counts[byte]][byte] = channel, 1 << position
                counts[byte] += 1
                channel += 1
        return channels, factors

    def bits(self) -> list[int]:
        """Return the number of bits of every channel."""
        return [bits for _, count, _, bits in self.fields() for _ in range(count)]


def runs_problem(runs: Runs, channels: int) -> str | None:
    """Check that runs describe `channels` channels; return an error message, or None if they do."""
    for pattern, count in runs:
        if pattern not in PATTERNS:
            return f"unknown pattern {pattern!r}; choose from {', '.join(PATTERNS)}"
        if not isinstance(count, int) or count < 2 or count % 2:
            return f"a run of {pattern} must have an even number of bytes, at least 2, not {count}"
    if (room := TokenFormat(runs).channels) != channels:
        return f"runs hold {room} channels, must hold {channels}"
    return None
