"""Classification of the files in a checkpoint's folder, by name alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from surgery.common.lineage import REPORT

CARD, SOURCE_CARD = "README.md", "README.source.md"
CONFIG = "config.json"
HEALING = "surgery_healing.json"
"""Healing record of a student without a conversion report."""


class Kind(Enum):
    """Role of a file in a checkpoint's folder."""

    CONFIG = "config"
    WEIGHTS = "weights"
    CODE = "code"
    TEMPLATE = "template"
    LOADED = "tokenizer or settings"
    DOCUMENT = "document"
    RECORD = "record of this program"
    OTHER = "other"


READ_BY_LOADERS = frozenset({Kind.CONFIG, Kind.WEIGHTS, Kind.CODE, Kind.TEMPLATE, Kind.LOADED})
"""Kinds that affect the loaded model or contain code that loading runs."""
CARRIED = frozenset({Kind.TEMPLATE, Kind.LOADED, Kind.DOCUMENT})
"""Kinds that are copied to the output checkpoint."""

_CODE_FOLDER, _TEMPLATE_FOLDER = "custom_generate", "additional_chat_templates"
# Suffixes are compared in lower case, also in front of a version: x.so.1.
_CODE = (
    *(".py", ".pyc", ".pyo", ".pyd", ".pyw", ".pyi", ".pyx", ".pyz", ".ipynb", ".egg", ".whl", ".so", ".dll"),
    *(".dylib", ".exe", ".com", ".msi", ".jar", ".class", ".wasm", ".cubin", ".ptx", ".hsaco", ".o", ".a", ".sh"),
    *(".bash", ".zsh", ".fish", ".bat", ".cmd", ".ps1", ".vbs", ".js", ".mjs", ".cjs", ".lua", ".pl", ".rb", ".c"),
    *(".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".desktop", ".app", ".scr", ".lnk"),
)
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".ggml", ".h5", ".hdf5", ".keras"),
    *(".msgpack", ".ot", ".tflite", ".onnx", ".onnx_data", ".pkl", ".pickle", ".joblib", ".npz", ".npy", ".nemo"),
    *(".mlmodel", ".pdparams", ".safetensors.index.json", ".bin.index.json"),
)
_LOADED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "encoder.json", "bpe.codes", "dict.txt", "emoji.json"),
    *("normalizer.json", "*.model", "tokenizer.model.v*", "*.tiktoken", "*.spm", "generation_config.json"),
    *("configuration.json", "processor_config.json", "*preprocessor_config.json", "*_processor_config.json"),
)
_DOCUMENTS = ("readme", "license", "licence", "copying", "notice", "use_policy", "citation", "model_card", "eula")
_DOCUMENTS += ("acceptable_use", "third_party", "third-party", "thirdparty", "terms_of_use", "system_prompt")
_DOCUMENT_SUFFIXES = ("", ".md", ".txt", ".rst", ".pdf", ".cff")
_RECORDS = (REPORT, HEALING, "heal.json", "heal.jsonl")


def kind_of(name: str) -> Kind:
    """Classify a file by its relative path, with slashes.

    Kinds that are copied match only names that published checkpoints use. A file that any loader or system may run is
    code, in upper or lower case.
    """
    *folders, file = name.lower().split("/")
    file = file.rstrip(" .")
    if name == CONFIG:
        return Kind.CONFIG
    if _CODE_FOLDER in folders[:1] or file.endswith(_CODE) or any(f"{end}." in file for end in (".so", ".dylib")):
        return Kind.CODE
    if file.endswith(_WEIGHTS):
        return Kind.WEIGHTS
    if folders == [_TEMPLATE_FOLDER] or (not folders and (file.endswith(".jinja") or file == "chat_template.json")):
        return Kind.TEMPLATE
    if folders or file.startswith("."):
        return Kind.OTHER
    if name in _RECORDS:
        return Kind.RECORD
    if any(fnmatchcase(file, pattern) for pattern in _LOADED):
        return Kind.LOADED
    if file.startswith(_DOCUMENTS) and os.path.splitext(file)[1] in _DOCUMENT_SUFFIXES:
        return Kind.DOCUMENT
    return Kind.OTHER


def list_files(folder: Path, *, hidden: bool = False) -> list[str]:
    """List the relative paths of all files in a folder and its subfolders, with slashes, sorted.

    A link to a folder is not followed; it is listed with a slash at its end. Raises OSError: a folder cannot be read.
    """

    def is_listed(name: str) -> bool:
        return hidden or not name.startswith(".")

    names = []
    for root, folders, files in os.walk(folder, onerror=_raise):
        below = Path(root).relative_to(folder)
        links = {name for name in folders if os.path.islink(os.path.join(root, name))}
        names += [f"{(below / name).as_posix()}/" for name in links if is_listed(name)]
        names += [(below / name).as_posix() for name in files if is_listed(name)]
        folders[:] = [name for name in folders if name not in links and is_listed(name)]
    return sorted(names)


def summary(names: Iterable[str], limit: int = 3) -> list[str]:
    """Summarize file names; a folder that is hidden or has over ``limit`` files is one entry: ``logs/ (120 files)``."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        top, slash, rest = name.partition("/")
        groups.setdefault(f"{top}/" if slash and rest else name, []).append(name)
    lines = []
    for group, members in groups.items():
        is_whole = group.endswith("/") and (len(members) > limit or group.startswith("."))
        lines += [f"{group} ({len(members)} files)"] if is_whole and members != [group] else members
    return [as_text(name) for name in lines]


def as_text(name: str) -> str:
    """Escape the bytes of a file name that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def _raise(error: OSError) -> None:
    raise error
