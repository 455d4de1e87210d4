"""The held-out texts of an evaluation: what ships with the package, files, datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from surgery.calibration.installed import installed_code, installed_prose
from surgery.calibration.text import iter_documents
from surgery.common.errors import SurgeryError
from surgery.eval.held_out_text import Document
from surgery.evaluation.settings import BUILTIN, EvalSettings

HELD_OUT = Path(__file__).parent.parent / "assets" / "heldout-stdlib.txt"
# Where the modules of that file begin, in characters.
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
"""Characters read of files and datasets for each token of a window: several times what the windows hold, so that
windows drawn from them differ."""


INSTALLED = {"prose": installed_prose, "code": installed_code}
MOST_MODULES = 64
"""Modules of installed code that are read at most: enough for many windows, and cheap to tokenise."""


def load_documents(settings: EvalSettings, conversations: Callable[[], list[str]] | None = None) -> list[Document]:
    """Reads every text that the settings name, as far as the windows need it.

    Args:
        conversations: gives those of the model, for `data` "chat".

    Raises:
        SurgeryError: a text cannot be read, or is empty.
    """
    wanted = settings.windows * settings.length * CHARACTERS_PER_TOKEN // len(settings.data)
    documents = []
    for name in settings.data:
        if name == BUILTIN:
            found = _builtin()
        elif name in INSTALLED:
            read = islice(INSTALLED[name](settings.seed), MOST_MODULES)
            found = _until(wanted, (Document(text, ((0, name),)) for _, text in read))
        elif name == "chat":
            found = [Document(text, ((0, name),)) for text in conversations()]
        else:
            found = _read(name, settings.text_field, wanted)
        if not found:
            raise SurgeryError(f"--data {name}: no text in it")
        documents += found
    return documents


def _builtin() -> list[Document]:
    if not HELD_OUT.exists():
        raise SurgeryError(f"{HELD_OUT}: missing from this installation; name a text with --data")
    return [Document(HELD_OUT.read_text(encoding="utf-8"), HELD_OUT_SECTIONS)]


def _read(name: str, text_field: str, wanted: int) -> list[Document]:
    # What is not a dataset's name is a path; its last part is enough to tell the sources of a report apart.
    source = Path(name).name if Path(name).expanduser().exists() else name
    return _until(wanted, (Document(text, ((0, source),)) for text in iter_documents(name, text_field=text_field)))


def _until(wanted: int, source: Iterable[Document]) -> list[Document]:
    """Documents until they have so many characters."""
    documents, size = [], 0
    for document in source:
        documents.append(document)
        size += len(document.text)
        if size >= wanted:
            break
    return documents
