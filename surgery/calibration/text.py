"""Documents of a text source for calibration and training, read lazily.

A source is "builtin", a local file, or the name of a dataset on the Hugging Face Hub. Every download is announced by a
line on standard error.
"""

import json
import os
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.removed import REMOVED
from surgery.common.setting import did_you_mean
from surgery.common.visible import visible

BUILTIN, PROSE, CODE, DOCSTRINGS, CHAT = "builtin", "prose", "code", "docstrings", "chat"
NAMED = [BUILTIN, PROSE, CODE, DOCSTRINGS, CHAT]
"""Texts of the package, which names of datasets may not resemble without an owner."""

# Shipped as the held-out text that conversions are measured on: calibrating on it would be cheating.
HELD_OUT_MODULES = frozenset(
    {
        "selectors.py",
        "keyword.py",
        "concurrent/futures/process.py",
        "multiprocessing/managers.py",
        "tkinter/messagebox.py",
        "_pyrepl/historical_reader.py",
        "encodings/charmap.py",
        "encodings/cp1250.py",
    }
)
# Tests are repetitive, and installed packages differ between machines.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "site-packages", "lib2to3"})
MODULE_BYTES = range(801, 300_000)
"""Sizes of modules to read: smaller ones are mostly imports, larger ones mostly tables."""

TEXT_PIECE = 32_768
"""Characters after which a plain text file is cut into a new document, at the next line end."""

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
DATASET = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:]*))?(:(?P<split>[^:]*))?")


def iter_documents(source: str, *, seed: int = 0, text_field: str = "text") -> Iterator[str]:
    """Iterate lazily over the documents of a text source, in a deterministic order, without empty ones.

    Args:
        source: "builtin", the running interpreter's standard library, a document per module; a `.txt` file, UTF-8, cut
            at line ends into documents of about 32k characters; a `.jsonl`, `.json` or `.parquet` file; or a dataset,
            `name` or `name:config:split` (default "train"), which is streamed; a local one is `path::train`.
        seed: shuffles the modules of "builtin"; files and datasets keep their order.
        text_field: field or column with the text in json, jsonl, parquet and datasets.

    Raises SurgeryError: the source does not exist, cannot be read, or lacks the field; possibly only during iteration.
    """
    path = Path(source).expanduser()
    if not source:
        raise SurgeryError(f"no text source; pass a file, a dataset or {BUILTIN!r}")
    if source == BUILTIN:
        documents = _standard_library(seed)
    elif path.is_dir():
        raise SurgeryError(f"{source} is a folder; pass a file in it, or {source}::train for a dataset folder")
    elif path.exists():
        documents = _file(path, text_field)
    else:
        documents = _dataset(source, text_field)
    return (text for text in documents if text.strip())


def _standard_library(seed: int) -> Iterator[str]:
    modules = standard_library_modules()
    random.Random(seed).shuffle(modules)
    return _read_modules(modules)


def standard_library_modules() -> list[Path]:
    """List the standard library's modules by path, without those of the held-out text.

    Raises SurgeryError: the interpreter has no source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = _modules(root)
    if not modules:
        raise SurgeryError(f"no source of the standard library at {root}; use a text file instead of {BUILTIN!r}")
    return modules


def _modules(root: Path) -> list[Path]:
    paths = []
    for folder, subfolders, files in os.walk(root):
        # Pruned here, so that a large site-packages is not walked.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return [
        path
        for path in sorted(paths)
        if path.relative_to(root).as_posix() not in HELD_OUT_MODULES and path.stat().st_size in MODULE_BYTES
    ]


def _read_modules(modules: list[Path]) -> Iterator[str]:
    for path in modules:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few modules have another encoding; skip them
            continue


def _file(path: Path, text_field: str) -> Iterator[str]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise SurgeryError(f"{path}: unknown file type; choose one of {', '.join(READERS)}")
    return reader(path, text_field)


def _txt(path: Path, _text_field: str) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for line in _lines(path):
        piece.append(line)
        size += len(line)
        if size >= TEXT_PIECE:
            yield "".join(piece)
            piece, size = [], 0
    yield "".join(piece)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends; very long lines, as in minified text, in pieces of TEXT_PIECE."""
    try:
        with path.open(encoding="utf-8") as file:
            while line := file.readline(TEXT_PIECE):
                yield line
    except UnicodeDecodeError as error:
        raise SurgeryError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    return (_field(record, text_field, where) for record, where in jsonl_records(path))


def jsonl_records(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the record of each line of a file, with its location for error messages.

    Raises SurgeryError: a line is not JSON.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _parse(line, where), where


def _json(path: Path, text_field: str) -> Iterator[str]:
    items = _parse(path.read_bytes(), str(path))
    if not isinstance(items, list):
        raise SurgeryError(f"{path} holds a {type(items).__name__}, not a list of documents")
    for index, item in enumerate(items):
        yield item if isinstance(item, str) else _field(item, text_field, f"{path}, item {index}")


def _parse(data: bytes, where: str) -> Any:
    try:
        value = json.loads(data)
        if b"\\u" in data or b"\xed" in data:  # lone surrogates, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 alike
        raise SurgeryError(f"{where} is not valid JSON: {error}") from error


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    return (_field(row, text_field, where) for row, where in parquet_records(path, text_field))


def parquet_records(path: Path, column: str, *others: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a file, with ``column`` and existing ``others``, and their locations for error messages.

    Raises SurgeryError: the file is damaged or lacks the column.
    """
    import pyarrow.parquet as pq  # slow import, 0.1 s
    from pyarrow import ArrowInvalid

    try:
        file = pq.ParquetFile(path)
    except ArrowInvalid as error:
        raise SurgeryError(f"{path} is not a parquet file: {error}") from error
    with file:
        names = file.schema_arrow.names
        if column not in names:
            raise SurgeryError(f"{path} has no column {column!r}, only {', '.join(names)}")
        columns = [column, *(name for name in others if name in names)]
        batches = file.iter_batches(batch_size=256, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((row, f"{path}, row {number}") for number, row in enumerate(rows))


READERS = {".txt": _txt, ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}


def _dataset(source: str, text_field: str) -> Iterator[str]:
    _dataset_parts(source)  # raises before iteration
    return (_field(row, text_field, where) for row, where in dataset_records(source))


def dataset_records(source: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Stream the rows of a dataset, with their locations for error messages.

    Raises SurgeryError: see :func:`open_dataset`, or reading fails later.
    """
    with dataset_errors(source):
        yield from ((row, f"dataset {source}, row {number}") for number, row in enumerate(open_dataset(source)))


def open_dataset(source: str) -> Any:
    """Open a dataset as a streaming `datasets.IterableDataset`, and print its origin to standard error.

    Raises SurgeryError: the dataset or the `datasets` library is missing.
    """
    name, config, split = _dataset_parts(source)
    try:
        import datasets
    except ImportError as error:
        raise SurgeryError(f"{source}: no such file; to use a dataset of that name: pip install datasets") from error
    is_folder = Path(name).expanduser().is_dir()
    label = f"{name}, {f'config {config}, ' if config else ''}split {split}"
    name, origin = (str(Path(name).expanduser()), "local folder") if is_folder else (name, "Hugging Face Hub")
    print(f"surgery: streaming the dataset {visible(label)}, from the {origin}", file=sys.stderr)
    with dataset_errors(source):
        return datasets.load_dataset(name, config, split=split, streaming=True)


@contextmanager
def dataset_errors(source: str) -> Iterator[None]:
    """Turn exceptions of `datasets`, and of the HTTP and file libraries under it, into one-line SurgeryErrors."""
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SurgeryError(f"{source}: no such file, and no dataset can be loaded: {reason}") from error


def _dataset_parts(source: str) -> tuple[str, str | None, str]:
    """Parse the name, config and split of a dataset, without network access.

    Raises SurgeryError: it cannot be a dataset's name.
    """
    parts = DATASET.fullmatch(source)
    name = parts["name"] if parts else ""
    # Names that look like files are not looked up on the Hub: most are typos.
    on_hub = HUB_NAME.fullmatch(name) and Path(source).suffix.lower() not in READERS
    if on_hub and "/" not in name and (hint := did_you_mean(name, NAMED)):
        raise SurgeryError(f"{source!r}: no such file{hint}; for a dataset of that name pass its owner too")
    if parts is None or not (on_hub or Path(name).expanduser().is_dir()):
        raise SurgeryError(
            f"{source!r}: no such file, and not a valid dataset name; pass a text file, a dataset or {BUILTIN!r}"
        )
    return name, parts["config"] or None, parts["split"] or "train"


def _field(item: Any, text_field: str, where: str) -> str:
    """Return the text of a record; null counts as empty."""
    if not isinstance(item, dict) or text_field not in item:
        has = f"only {', '.join(map(str, item))}" if isinstance(item, dict) else f"but is a {type(item).__name__}"
        if isinstance(item, dict) and "messages" in item:
            raise SurgeryError(f"{where}: conversations are not read: {REMOVED['data format']}")
        raise SurgeryError(f"{where} has no field {text_field!r}, {has}; set text_field")
    text = item[text_field]
    if text is not None and not isinstance(text, str):
        raise SurgeryError(f"{where}: field {text_field!r} is a {type(text).__name__}, not text")
    return text or ""
