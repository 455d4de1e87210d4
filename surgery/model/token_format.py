"""The packed row of a token in a quantized cache: how many bits each channel has, and where they lie.

Every token has a row of its own, of the same bytes, so that a cache of rows can be cropped, reordered, shared by prefix
and written in any chunks. A row is a sequence of runs. All bytes of a run hold the same fields, the first in the lowest
bits; field f of byte b is channel `f * bytes + b` of the run. Neighboring channels so lie in neighboring bytes, and
two of these, a lane of 16 bits, become two fp16 values by one mask. No torch here.

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
"""Bits of the fields of a byte. Fractional levels would save a percent of the loss for three times the instructions."""

GAIN_BYTES = 2
"""Bytes of the inverse rms of a KV head's key, fp16, which follows the packed values in a row."""

Runs = tuple[tuple[str, int], ...]
"""Patterns, and how many bytes have each."""


@dataclass(frozen=True)
class TokenFormat:
    """A row of packed values."""

    runs: Runs

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(count for _, count in self.runs)

    @property
    def channels(self) -> int:
        """Values of a row."""
        return sum(count * len(PATTERNS[pattern]) for pattern, count in self.runs)

    def fields(self) -> list[tuple[int, int, int, int]]:
        """Return first byte, bytes, lowest bit and bits of every field, in the order of the channels."""
        fields, start = [], 0
        for pattern, count in self.runs:
            position = 0
            for bits in PATTERNS[pattern]:
                fields.append((start, count, position, bits))
                position += bits
            start += count
        return fields

    def layout(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the channel of every field of every byte [fields][bytes], and the factor of its code in the byte.

        A byte with fewer fields than another has factors of 0.
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
        """Return the bits of every channel."""
        return [bits for _, count, _, bits in self.fields() for _ in range(count)]


def runs_problem(runs: Runs, channels: int) -> str | None:
    """Return why runs are not those of so many channels; None if they are."""
    for pattern, count in runs:
        if pattern not in PATTERNS:
            return f"pattern {pattern!r} is none of {', '.join(PATTERNS)}"
        if not isinstance(count, int) or count < 2 or count % 2:
            return f"a run of {count} bytes of {pattern}: an even number of at least 2 is needed"
    if (room := TokenFormat(runs).channels) != channels:
        return f"runs hold {room} channels, and there are {channels}"
    return None
