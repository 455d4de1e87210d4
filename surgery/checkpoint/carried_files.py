"""Source files that are copied to the output checkpoint, read once at the start so that later edits do not matter."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.file_kinds import CARD, CARRIED, CONFIG, HEALING, REPORT, SOURCE_CARD, Kind, kind_of, summary
from surgery.checkpoint.layout import is_hub_blob
from surgery.checkpoint.reader import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.temporary import TemporaryFolder

LARGEST = 2**30
"""Maximum size in bytes of a copied file; the largest tokenizers have a thirtieth of it."""
NAMES_CODE = ("auto_map", "custom_pipelines")
"""Keys of JSON files that refer to code in the folder or in another repository."""
_CONTINUED = (REPORT, HEALING)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "encoder.json", "tekken.json")


@dataclass(frozen=True)
class CarriedFiles:
    """Snapshot of the source files that the output checkpoint takes over; removed at the end of its `with` block.

    Attributes:
        folder: temporary folder of the snapshot, with the source's config.json.
        names: files to copy, without config.json and this program's records, which stages extend.
        left_out: names of all other files; for removed entries that refer to code, file and entry.
        keeps_code: whether code files are copied.
    """

    folder: Path
    names: tuple[str, ...]
    records: tuple[str, ...]
    left_out: tuple[str, ...]
    keeps_code: bool
    owner: TemporaryFolder

    @classmethod
    def of(cls, reader: CheckpointReader, *, keep_code: bool = False) -> CarriedFiles:
        """Snapshot the files of an opened checkpoint. Chat templates are always copied, since they run in a sandbox.

        Raises SurgeryError: a file cannot be read or is too large.
        """
        files = reader.files
        origin = reader.stored_path if reader.stored_names else reader.path
        config = reader.stored_config if reader.stored_names else reader.config
        owner = TemporaryFolder("files")
        folder = owner.path / reader.name
        names = [
            name
            for name in files.sidecars
            if _is_carried(name, keep_code) and not _is_foreign(files.folder / name, kind_of(name))
        ]
        records = [name for name in files.sidecars if name in _CONTINUED]
        left_out = {*files.sidecars, *files.strays} - {*names, *records}
        try:
            with disk_errors(folder):
                folder.mkdir()
                for name in (*names, *records):
                    content = _content(files.folder / name)
                    if not keep_code and name in names and (entries := _names_of_code(content, name)):
                        content = _without_keys(content, entries)
                        left_out |= {f"{name}: {entry}" for entry in entries}
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content)
                (folder / CONFIG).write_bytes(_config_bytes(origin, config))
        except BaseException:
            owner.remove()
            raise
        return cls(folder, tuple(names), tuple(records), tuple(sorted(left_out)), keep_code, owner)

    def __enter__(self) -> CarriedFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.owner.remove()

    @property
    def code(self) -> list[str]:
        """Names of the copied code files."""
        return [name for name in self.names if kind_of(name) is Kind.CODE]

    def record(self, names: Collection[str]) -> dict[str, list[str]]:
        """Return the report entry about the files, of which those named as the output's are not left out."""
        replaced = {CARD, SOURCE_CARD, *names}
        return {
            "templates": [name for name in self.names if kind_of(name) is Kind.TEMPLATE],
            "code": self.code,
            "left_out": summary(name for name in self.left_out if name not in replaced),
        }

    def own_config(self, config: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
        """Remove config entries that refer to code outside the output's files ``own``, unless code is copied."""
        if self.keeps_code:
            return config
        return _own_entries(config, {name.removesuffix(".py") for name in own})


def _is_carried(name: str, keep_code: bool) -> bool:
    """Return whether a file is copied; names with unprintable characters never are."""
    return name.isprintable() and (kind_of(name) in CARRIED or (keep_code and kind_of(name) is Kind.CODE))


def _is_foreign(path: Path, kind: Kind) -> bool:
    """Return whether a document is a link, such as LICENSE to a private key; files of the hub's cache are not."""
    return kind is Kind.DOCUMENT and path.is_symlink() and not is_hub_blob(Path(os.path.realpath(path)))


def _content(path: Path) -> bytes:
    with disk_errors(path), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise SurgeryError.at(
                path, f"is larger than {LARGEST:,} bytes, the limit for files next to the weights; remove it"
            )
        return file.read()


def _config_bytes(origin: Path, config: dict[str, Any]) -> bytes:
    """Return a config.json's original bytes, or its content serialized if reading changed it or the file changed."""
    content = _content(origin / CONFIG)
    try:
        same = json.loads(content) == config
    except (ValueError, RecursionError):
        same = False
    return content if same else (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _names_of_code(content: bytes, name: str) -> list[str]:
    """List the keys of a JSON file that refer to code."""
    if not name.lower().endswith(".json") or name in _VOCABULARIES:
        return []
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return []  # the reader of the file reports the error
    return [entry for entry in NAMES_CODE if isinstance(value, dict) and entry in value]


def _without_keys(content: bytes, entries: Collection[str]) -> bytes:
    value = {name: each for name, each in json.loads(content).items() if name not in entries}
    return (json.dumps(value, indent=2) + "\n").encode()


def _own_entries(config: Any, modules: Collection[str]) -> Any:
    if isinstance(config, list):
        return [_own_entries(each, modules) for each in config]
    if not isinstance(config, dict):
        return config
    return {
        name: _own_entries(value, modules)
        for name, value in config.items()
        if name not in NAMES_CODE or _is_own(value, modules)
    }


def _is_own(value: Any, modules: Collection[str]) -> bool:
    """Return whether an ``auto_map`` refers only to classes in these modules."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(each, str) and each.rpartition(".")[0] in modules for each in value.values())
