"""Hostile files: how many, what they are made of, and what a reader may do with one."""

import copy
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from surgery.common.errors import SurgeryError

T = TypeVar("T")
CASES = int(os.environ.get("SURGERY_CASES", "0"))
"""Examples of every property; 0 for the few of a daily run, which are the same ones each time."""
SPARE_BYTES = 2**30

OUTSIDE = ("../../etc/passwd", "/etc/passwd", "a\0b", "\ud800", "two\nlines")
MARKUP = ("<script>alert(1)</script>", "| a | b |\n---", "`rm -rf /`", "---\n- !!python/object/apply:os.system [id]")
TEXTS = st.sampled_from(("", "x", "nan", "1e400", "0x_", "$\\frac{", "a" * 5000, *OUTSIDE, *MARKUP))
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 7, 2**31, 2**60, 2**63, 2**64 - 1, 10**30, -(10**30), 0.0, -0.5, 1e-300, 1e308]
) | st.sampled_from([float("inf"), float("-inf"), float("nan")])
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.integers(-5, 300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def cases(few: int, limit: int | None = None) -> settings:
    """Settings of a property that is looked at in ``few`` examples, or SURGERY_CASES of them but ``limit``."""
    return settings(
        max_examples=min(CASES, limit or CASES) if CASES else few,
        derandomize=not CASES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def taken_or_refused(read: Callable[[], T]) -> T | None:
    """Return the result of a read, or None where it is refused in one line; any other error is the test's."""
    try:
        return read()
    except SurgeryError as error:
        line = str(error)
        assert line and "\n" not in line and len(line) < 2000, line[:3000]
        return None


@contextmanager
def bounded_memory(spare: int = SPARE_BYTES) -> Iterator[None]:
    """Fails what asks for more address space than the process has and some to spare."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@st.composite
def mutated(draw: st.DrawFn, document: Any, junk: st.SearchStrategy = JUNK) -> Any:
    """A plain value (JSON, YAML) with one to three of its parts replaced, left out or said twice."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(list(_positions(document)) or [({"": document}, "")]))
        action = draw(st.sampled_from(("replace", "replace", "replace", "drop", "add")))
        if action == "replace":
            holder[key] = draw(junk)
        elif action == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(TEXTS | st.text(max_size=4))] = draw(junk)
        else:
            holder.insert(key, draw(junk))
    return document


def _positions(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every part of a plain value, as what holds it and its key there."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _positions(inner)


@st.composite
def damaged(draw: st.DrawFn, content: bytes, head: int | None = None) -> bytes:
    """Bytes of which a few, among the first ``head``, were changed, left out or put in, or that end too early."""
    content, head = bytearray(content), head or len(content)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(0, min(head, len(content)) - 1)))
        action = draw(st.sampled_from(("flip", "word", "drop", "put", "end")))
        if action == "flip" and content:
            content[position] ^= 1 << draw(st.integers(0, 7))
        elif action == "word":
            width = draw(st.sampled_from((4, 8)))
            number = draw(st.sampled_from((0, 1, 2**8, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)))
            content[position : position + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
        elif action == "drop":
            del content[position : position + draw(st.integers(1, 16))]
        elif action == "put":
            content[position:position] = draw(st.binary(min_size=1, max_size=16))
        elif action == "end":
            del content[position:]
    return bytes(content)
