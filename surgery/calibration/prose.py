"""Calibration prose that ships with Python, and extraction of prose from markup.

It is the language reference of `help()` and the standard library's docstrings, of which models have memorized much. So
losses are measured on other text (`surgery.calibration.installed`).
"""

from __future__ import annotations

import ast
import random
import re
from collections import deque
from collections.abc import Iterator

from surgery.calibration.text import standard_library_modules

LEAST_WORDS = 12
"""Minimum words of a paragraph: shorter ones are headings, captions and lists of names."""
LEAST_LETTERS = 0.75
"""Minimum share of letters and spaces in a paragraph: less is markup, a table or code."""
LEAST_DOCUMENT = 400
"""Minimum characters of a document."""

BLOCKS = {"body", "handlers", "orelse", "finalbody", "cases"}
"""Fields of Python's statements that hold statements."""

# Patterns of markup and their replacements, applied before a text is split into paragraphs.
MARKUP = (
    (re.compile(r"^( *)(```|~~~).*?^ *\2[^\n]*$", re.M | re.S), ""),  # fenced code
    (re.compile(r"<!--.*?-->|<(pre|code|table|style|script)\b.*?</\1>", re.S | re.I), ""),
    (re.compile(r"\[?!\[[^\]]*\]\([^)]*\)(\]\([^)]*\))?|\[?!\[[^\]]*\]\[[^\]]*\](\]\[[^\]]*\])?"), ""),  # badges
    (re.compile(r"\[([^\[\]]+)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),  # links of Markdown
    (re.compile(r"`([^`<]+) <[^`>]*>`_+"), r"\1"),  # and of reStructuredText
    (re.compile(r":[a-z:]+:`~?([^`]*)`"), r"\1"),  # roles
    (re.compile(r"</?[a-zA-Z][^<>]*>"), ""),
    (re.compile(r"^ *\[[^\]]+\]:.*$", re.M), ""),  # targets of links
    (re.compile(r"^.*\|.*\|.*$", re.M), ""),  # tables
)
BULLET = re.compile(r"\n(?= {0,3}(?:[-*+•]|\d+[.)]) )")
MARKER = re.compile(r"^(?:[-*+•>]|\d+[.)]|#+) +")


def paragraphs(text: str) -> list[str]:
    """Extract the paragraphs of running text from a document with markup, each on one line.

    Headings, lists of short items, tables, code, badges and addresses are left out.
    """
    for pattern, rest in MARKUP:
        text = pattern.sub(rest, text.replace("\r\n", "\n"))
    pieces = [piece for block in re.split(r"\n[ \t]*\n", text) for piece in BULLET.split(block.strip("\n"))]
    lines = (MARKER.sub("", " ".join(piece.split())) for piece in pieces if not piece.startswith(("    ", "\t", "..")))
    return [line for line in lines if _is_prose(line)]


def _is_prose(line: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in line)
    return len(line.split()) >= LEAST_WORDS and letters >= LEAST_LETTERS * len(line) and line[-1] in ".?!:"


def builtin_prose(seed: int) -> Iterator[str]:
    """Yield documents of the running interpreter's prose, shuffled by the seed, about 1.3 MB in total.

    Documents are topics of the language reference, and the docstrings of each standard library module.
    """
    from pydoc_data.topics import topics

    sources = [*sorted(topics), *standard_library_modules()]
    random.Random(seed).shuffle(sources)
    for source in sources:
        text = topics[source] if isinstance(source, str) else docstrings(source.read_bytes())
        document = "\n\n".join(dict.fromkeys(paragraphs(text)))
        if len(document) >= LEAST_DOCUMENT:
            yield document


def docstrings(source: bytes) -> str:
    """Join all docstrings of a module; empty for source that this Python cannot parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a few modules need another version of Python
        return ""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = (ast.get_docstring(node) for node in _statements(tree) if isinstance(node, kinds))
    return "\n\n".join(filter(None, texts))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield a module and its statements in the order of `ast.walk`, skipping expressions, which are most nodes."""
    nodes: deque[ast.AST] = deque([tree])
    while nodes:
        yield (node := nodes.popleft())
        for field in node._fields:
            if field in BLOCKS:
                nodes.extend(getattr(node, field))
