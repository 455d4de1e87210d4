"""Held-out texts of evaluations: shipped text, text of installed packages, files, datasets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surgery.calibration.installed import installed_code, installed_prose
from surgery.calibration.mixture import CODE, PROSE, SMALL_VOCABULARY
from surgery.calibration.text import BUILTIN, iter_documents
from surgery.common.errors import SurgeryError
from surgery.eval.held_out_text import Document

HELD_OUT = Path(__file__).parent.parent / "assets" / "heldout-stdlib.txt"
# Start of each module in that file, in characters.
HELD_OUT_SECTIONS = (
    (0, "selectors"),
    (19_458, "keyword"),
    (20_532, "concurrent.futures.process"),
    (56_281, "multiprocessing.managers"),
    (104_207, "tkinter.messagebox"),
    (108_069, "_pyrepl.historical_reader"),
    (121_216, "encodings.charmap"),
    (123_301, "encodings.cp1250"),
)

CHARACTERS_PER_TOKEN = 16
"""Characters to read per token of a window: several times the windows' text, so that random windows differ."""


INSTALLED = {PROSE: installed_prose, CODE: installed_code}
MOST_MODULES = 64
"""Maximum documents of installed text to read: enough for many windows, and cheap to tokenize."""


def default_names(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the default texts of a model: prose and code, or "builtin" for a small vocabulary such as the demo's.

    Larger language models have memorized the shipped modules of "builtin".
    """
    return (BUILTIN,) if len(tokenizer) < SMALL_VOCABULARY else (PROSE, CODE)


def load_documents(names: Sequence[str], tokens: int, *, seed: int = 0, text_field: str = "text") -> list[Document]:
    """Read the named texts ("builtin", "prose", "code", files and datasets), as far as windows of ``tokens`` need.

    The seed shuffles the text of installed packages. Raises SurgeryError: a text cannot be read, or is empty.
    """
    characters = tokens * CHARACTERS_PER_TOKEN // len(names)
    documents = []
    for name in names:
        if name == BUILTIN:
            loaded = _builtin()
        elif name in INSTALLED:
            read = islice(INSTALLED[name](seed), MOST_MODULES)
            loaded = _take(characters, (Document(text, ((0, name),)) for _, text in read))
        else:
            loaded = _read(name, text_field, characters)
        if not loaded:
            raise SurgeryError(f"{name}: contains no text; choose another text")
        documents += loaded
    return documents


def _builtin() -> list[Document]:
    if not HELD_OUT.exists():
        raise SurgeryError(f"{HELD_OUT}: missing from this installation; pass a text with --data")
    return [Document(HELD_OUT.read_text(encoding="utf-8"), HELD_OUT_SECTIONS)]


def _read(name: str, text_field: str, characters: int) -> list[Document]:
    # A file's name is enough to tell the sources of a report apart.
    source = Path(name).name if Path(name).expanduser().exists() else name
    return _take(characters, (Document(text, ((0, source),)) for text in iter_documents(name, text_field=text_field)))


def _take(characters: int, source: Iterable[Document]) -> list[Document]:
    """Take documents until they have ``characters`` characters."""
    documents, size = [], 0
    for document in source:
        documents.append(document)
        size += len(document.text)
        if size >= characters:
            break
    return documents
