"""Words of the repository: openings of docstrings, replaced words, lengths of sentences in the docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("surgery", "surgery_vllm", "eval", "training", "kernels", "tools")
CODE = (*PRODUCT, "tests")

DOCSTRING = re.compile(r'(?:\A|:(?: *#.*)?\n) *r?"""(.+)')
"""First line of a docstring: of a module, or after the line that ends with the colon of a class or function."""

QUESTION = re.compile(r"(What|How|Which|Where|Whether|When|Who|Whose|Why|Of|As)\b")
MOST_QUESTIONS = 0.02
"""Share of docstrings that may open with a question or a fragment instead of a noun phrase or an imperative."""

REPLACED = {
    r"pictures and text": "vision-language, multimodal",
    r"predict further tokens": "MTP layers",
    r"by heart": "memorized",
    r"made anew|begins? anew|starts? anew": "rebuilt, from scratch",
    r"goes on from": "resumes from",
    r"one behind the other": "one after the other",
    r"Foreseen|foresee|foreseen": "Forecast, forecast",
    r"StageRuns|go_past": "StageTracker, skip",
    r"not in the repository": "a command, recipe or tool that reruns the figure, or no figure",
    r"met_moment|is_further|TOWERS": "gradient_weighted_moment, is_mtp_layer, MULTIMODAL",
}
"""Words that stand nowhere in the code and the docs, and the field's word for each."""

AMERICAN = re.compile(
    r"(?i)((quant|memor|normal|token|initial|special|factor|optim|synchron|recogn|neutral)is(e[ds]?|ers?|ing|ations?)"
    r"|colour(s|ed|ing)?|behaviours?|neighbour(s|ing)?|(un)?centre[ds]?|licences?)(?![a-z])"
)
"""British spellings; the repository is spelled as PyTorch's docs are."""
LETTERS = re.compile("[A-Za-z]+")
"""Each run of letters is looked at once a file."""
USERS_NAMES = re.compile(r"dequantised_from|keep[_-]quantised|\"memorised|\"(?i:licence)\"|honours_document_masks")
"""Names of users' files, settings and report fields, and an attribute of the remote code of old checkpoints."""

PARTICIPLES = {
    *("found", "said", "given", "asked", "wanted", "kept", "told", "seen", "made", "held", "taken", "left"),
    *("done", "written", "handed_on", "most", "known", "named", "met", "shown", "chosen", "tried", "gone", "got"),
    *("lost", "mixed", "shrunk", "grown", "begun", "heard", "fed", "looked"),
}
"""Names that say how a thing came instead of what it is."""
NAMED_SO = {
    "kept": (
        # A setting of checkpoints, the parameter of tasks that plugins implement, and `keep_layers` of plans in files.
        *("surgery/architectures/sliced.py", "eval/session.py", "eval/tasks/", "surgery/structures/"),
    ),
    "held": ("kernels/lowrank_decode/",),  # a keyword of a public operator
    "asked": ("surgery/planning/", "surgery/structures/"),  # fields of plans in users' files
    "most": ("surgery/common/setting.py", "surgery/model/left_padding.py"),  # pairs with `least`
    "seen": ("surgery/model/",),  # an attribute of cache layers, which count all tokens that came
    "done": ("surgery/common/phase.py", "surgery/common/progress.py"),  # `total` and `done` of a progress bar
    "written": ("surgery/evaluation/run.py", "surgery/workflow/"),  # a public field of results
}
"""Participles that stay, and the files or folders that may use each."""

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


@pytest.fixture(scope="module")
def texts(sources):
    """Return code and docs by file, without this file, which has all words."""
    pages = {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")}
    pages |= {ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
    return {file: text for file, text in (sources | pages).items() if file != Path(__file__).resolve()}


def test_replaced_words_stay_replaced(texts):
    pattern = re.compile(rf"\b({'|'.join(REPLACED)})\b")
    hits = [
        f"{file.relative_to(ROOT)}: {line.strip()}: write {REPLACED[words]}"
        for file, text in texts.items()
        if pattern.search(text)
        for line in text.splitlines()
        for words in REPLACED
        if re.search(rf"\b({words})\b", line)
    ]
    assert not hits, hits[:10]


def test_spelling_is_american(texts):
    hits = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file, text in texts.items()
        if "old_checkpoints" not in file.parts and AMERICAN.search(" ".join(set(LETTERS.findall(text))))
        for match in AMERICAN.finditer(USERS_NAMES.sub("", text))
    ]
    assert not hits, hits[:10]


def _variables(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name and line of every variable, argument and dataclass field that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_variables_are_named_by_nouns(sources):
    hits = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file, source in sources.items()
        if file.relative_to(ROOT).parts[0] in PRODUCT
        for name, line in _variables(ast.parse(source))
        if name in PARTICIPLES and not str(file.relative_to(ROOT)).startswith(NAMED_SO.get(name, ()))
    ]
    assert not hits, hits


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


def test_sentences_of_docs_are_short():
    for page in READ:
        lengths = sentence_lengths(page.read_text(encoding="utf-8"))
        long = [length for length in lengths if length > LONG]
        message = page, fmean(lengths), long
        assert fmean(lengths) <= LONGEST_MEAN and len(long) <= MOST_LONG * len(lengths), message
