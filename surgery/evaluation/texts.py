"""The held-out texts of an evaluation: what ships with the package, files, datasets."""

from __future__ import annotations

from pathlib import Path

from surgery.calibration.text import iter_documents
from surgery.errors import SurgeryError
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


def load_documents(settings: EvalSettings) -> list[Document]:
    """Reads every text that the settings name, as far as the windows need it.

    Raises:
        SurgeryError: a text cannot be read, or is empty.
    """
    wanted = settings.windows * settings.length * CHARACTERS_PER_TOKEN // len(settings.data)
    documents = []
    for name in settings.data:
        found = _builtin() if name == BUILTIN else _read(name, settings.text_field, wanted)
        if not found:
            raise SurgeryError(f"--data {name}: no text in it")
        documents += found
    return documents


def _builtin() -> list[Document]:
    if not HELD_OUT.exists():
        raise SurgeryError(f"{HELD_OUT}: missing from this installation; name a text with --data")
    return [Document(HELD_OUT.read_text(encoding="utf-8"), HELD_OUT_SECTIONS)]


def _read(name: str, text_field: str, wanted: int) -> list[Document]:
    documents, size = [], 0
    # What is not a dataset's name is a path; its last part is enough to tell the sources of a report apart.
    source = Path(name).name if Path(name).expanduser().exists() else name
    for text in iter_documents(name, text_field=text_field):
        documents.append(Document(text, ((0, source),)))
        size += len(text)
        if size >= wanted:
            break
    return documents
