"""What a task has a model do, told before there is a model: passes, tokens, and the largest cache on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from surgery.eval.session import Session

PASS_TOKENS = {"cpu": 10, "cuda": 300}
"""Tokens that take as long to compute as the weights take to be read, which every pass does: operations over bytes a
second, by half the bytes of a number. Of a server's processor in float32, and of an H100 in bfloat16."""


@dataclass(frozen=True)
class Work:
    """Of one model; where answers may end early, at most.

    Attributes:
        passes: forward passes.
        read: tokens of all sequences that are read many at a time.
        decoded: those that are passed one by one.
        rows: sequences, and `length`: tokens of each, of the largest cache.
    """

    passes: int = 0
    read: int = 0
    decoded: int = 0
    rows: int = 0
    length: int = 0

    def cost(self, device: str) -> int:
        """In tokens that are read, on this type of device: for shares of the time, not for seconds."""
        return self.read + self.decoded + self.passes * PASS_TOKENS.get(device, PASS_TOKENS["cuda"])

    def __add__(self, other: Work) -> Work:
        rows, length = max((self.rows, self.length), (other.rows, other.length), key=lambda size: size[0] * size[1])
        return Work(self.passes + other.passes, self.read + other.read, self.decoded + other.decoded, rows, length)


@runtime_checkable
class ForeseenTask(Protocol):
    """A task that can tell its work beforehand; `session` has no processes then."""

    def work(self, session: Session) -> dict[str, Work]:
        """Of measuring one model, by the names of the task's phases, as progress has them."""


def reading(count: int, length: int, batch: int, new_tokens: int = 0) -> Work:
    """Of `count` sequences of `length` tokens in batches, each continued by `new_tokens` one by one."""
    passes = -(-count // batch) * (1 + new_tokens)
    return Work(passes, count * length, count * new_tokens, min(count, batch), length + new_tokens)


def completing(count: int, length: int, batch: int, new_tokens: int) -> Work:
    """Of greedy completions of `count` prompts: the pass that reads a prompt gives the first new token."""
    return reading(count, length, batch, new_tokens - 1)


def at_most(count: int, limit: int | None) -> int:
    """Samples of a task under a `--limit`."""
    return count if limit is None else min(count, limit)
