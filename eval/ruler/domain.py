"""Prompt templates of RULER-style tasks: RULER's own for text, and comments in Python source for code.

`TEXT` copies RULER's prompts verbatim (Hsieh et al., arXiv:2404.06654; github.com/NVIDIA/RULER, Apache-2.0,
scripts/data/synthetic/constants.py), including a misspelling, to keep scores comparable. The only change: the trailing
space of the variable tracking prompt is removed, because tokenizers attach a space to the word that follows it.

`CODE` adapts the tasks to models that are trained on source code and do not follow English instructions:

- the haystack is lines of source text, and the noise a line without effect;
- needles and question are those of `surgery.eval.recall`, without an instruction before the haystack; numbers have
  five digits as there, uuids are RULER's;
- variable tracking uses Python assignments; lists are comments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surgery.common.errors import SurgeryError
from surgery.eval.haystack import REPEATED_SENTENCE, Haystack, python_reference
from surgery.eval.recall import FACT, QUESTION


@dataclass(frozen=True)
class Domain:
    """Prompt templates of one domain, "text" or "code"; names in backticks are format fields.

    Attributes:
        split: function from a text to a haystack; ``noise``: repeated noise line.
        join: separator of noise lines and needles; empty if they end in a newline.
        needle: fact with `kind` ("numbers" or "uuids"), `key` and `value`; numbers have this many digits.
        find_one, find_all: prompts for one or several values, with `kind` ("number"; "numbers"), `context`, `query`.
        root, hop: assignment of a `value` to a `name`, and of a variable `source` to a `name`.
        assignments_end, assignments_join: end of a noise line and separator of lines in variable tracking.
        track, common, frequent: prompts for variables, with `context`, `value`, `count`, and for words, with `context`.
    """

    name: str
    split: Callable[[str], Haystack]
    noise: str
    join: str
    needle: str
    digits: int
    find_one: str
    find_all: str
    root: str
    hop: str
    assignments_end: str
    assignments_join: str
    track: str
    common: str
    frequent: str


TEXT = Domain(
    name="text",
    split=Haystack.of_words,
    noise=REPEATED_SENTENCE,
    join="\n",
    needle="One of the special magic {kind} for {key} is: {value}.",
    digits=7,
    find_one=(
        "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n{context}\n"
        "What is the special magic {kind} for {query} mentioned in the provided text? "
        "The special magic {kind} for {query} mentioned in the provided text is"
    ),
    find_all=(
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n{context}\n"
        "What are all the special magic {kind} for {query} mentioned in the provided text? "
        "The special magic {kind} for {query} mentioned in the provided text are"
    ),
    root="VAR {name} = {value}",
    hop="VAR {name} = VAR {source} ",
    assignments_end="\n",
    assignments_join=" ",
    track=(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        "Question: Find all variables that are assigned the value {value} in the text above. "
        "Answer: According to the chain(s) of variable assignment in the text above, "
        "{count} variables are assgined the value {value}, they are:"
    ),
    common=(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\n"
        "Question: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    ),
    frequent=(
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. {context}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text? "
        "Answer: According to the coded text above, the three most frequently appeared words are:"
    ),
)

CODE = Domain(
    name="code",
    split=Haystack.of_lines,
    noise="assert True\n",
    join="",
    needle=FACT.format(name="{key}", value="{value}"),
    digits=5,
    find_one="{context}" + QUESTION.format(name="{query}"),
    find_all="{context}\n# Recall: the secret keys of {query} are",
    root="{name} = {value}\n",
    hop="{name} = {source}\n",
    assignments_end="",
    assignments_join="",
    track="{context}\n# The {count} variables that are equal to {value}:",
    common="# A numbered list of words, some of them many times:\n# {context}\n# The 10 most common words of the list:",
    frequent="# A text:\n# {context}\n# The three most frequent words of the text, without the dots:",
)

DOMAINS = {domain.name: domain for domain in (TEXT, CODE)}


def haystack_text(text: str | None) -> str:
    """Return `text`, or the Python language reference for None. Raises SurgeryError: the text is empty."""
    if text is not None and not text.strip():
        raise SurgeryError("the haystack text is empty: give a text file with some words in it")
    return python_reference() if text is None else text
