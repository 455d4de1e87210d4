"""Words of the repository: openings of docstrings, replaced words, lengths of sentences in the docs."""

import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("surgery", "surgery_vllm", "eval", "training", "kernels", "tools", "tests")

DOCSTRING = re.compile(r'(?:\A|:(?: *#.*)?\n) *r?"""(.+)')
"""First line of a docstring: of a module, or after the line that ends with the colon of a class or function."""

QUESTION = re.compile(r"(What|How|Which|Where|Whether|When|Who|Whose|Why|Of|As)\b")
MOST_QUESTIONS = 0.02
"""Share of docstrings that may open with a question or a fragment instead of a noun phrase or an imperative."""

REPLACED = {
    r"pictures and text": "vision-language, multimodal",
    r"predict further tokens": "MTP layers",
    r"by heart": "memorised",
    r"made anew|begins? anew|starts? anew": "rebuilt, from scratch",
    r"goes on from": "resumes from",
    r"one behind the other": "one after the other",
    r"Foreseen|foresee|foreseen": "Forecast, forecast",
    r"StageRuns|go_past": "StageTracker, skip",
    r"not in the repository": "a command, recipe or tool that reruns the figure, or no figure",
    r"met_moment|is_further|TOWERS": "gradient_weighted_moment, is_mtp_layer, MULTIMODAL",
}
"""Words that stand nowhere in the code and the docs, and the field's word for each."""

GENERATED = ("reference.md", "report.md")
READ = [
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name not in GENERATED),
    *(ROOT / name for name in ("CONTRIBUTING.md", "kernels/README.md", "recipes/README.md")),
]
"""Pages whose sentences are short; what tools write is left to them."""
LONGEST_MEAN, LONG, MOST_LONG = 18, 35, 0.05
"""Words of a sentence on average; words from which on one is long; the share of long ones."""


def _python_files():
    return [file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py")) if ".venv" not in file.parts]


@pytest.fixture(scope="module")
def sources():
    """Return the text of every Python file, each once: folders linked into the package are read at the top only."""
    return {file: file.read_text(encoding="utf-8") for file in {each.resolve() for each in _python_files()}}


def test_docstrings_say_what_a_thing_is_or_does(sources):
    opened, questions = 0, []
    for file, source in sources.items():
        for line in DOCSTRING.findall(source):
            opened += 1
            if QUESTION.match(line):
                questions.append(f"{file.relative_to(ROOT)}: {line}")
    assert opened > 4000 and len(questions) < MOST_QUESTIONS * opened, questions[:20]


@pytest.mark.parametrize("words", REPLACED)
def test_replaced_words_stay_replaced(sources, words):
    pattern = re.compile(rf"\b({words})\b")
    pages = {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")}
    pages |= {ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
    hits = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file, text in (sources | pages).items()
        if file != Path(__file__).resolve() and pattern.search(text)
        for line in text.splitlines()
        if pattern.search(line)
    ]
    assert not hits, f"write {REPLACED[words]}: {hits[:10]}"


def sentence_lengths(page: str) -> list[int]:
    """Count the words of each sentence of a page in Markdown, without code, tables, headings and pictures."""
    page = re.sub(r"(?ms)^```.*?^```\s*$|<!--.*?-->", "\n\n", page)
    page = re.sub(r"(?m)^(\s*\||#|!\[|\[!|    ).*$", "\n", page)
    page = re.sub(r"(?m)^\s*([-*]|\d+\.)\s+", "\n\n", page)
    page = re.sub(r"`[^`]*`", "X", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page))
    lengths = []
    for paragraph in re.split(r"\n\s*\n", page):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z(])", " ".join(paragraph.split())):
            lengths.append(len(re.findall(r"\S*\w\S*", sentence)))
    return [length for length in lengths if length > 2]


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_of_docs_are_short(page):
    lengths = sentence_lengths(page.read_text(encoding="utf-8"))
    long = [length for length in lengths if length > LONG]
    assert fmean(lengths) <= LONGEST_MEAN and len(long) <= MOST_LONG * len(lengths), (fmean(lengths), long)
