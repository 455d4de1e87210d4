"""Location of a checkpoint: a folder, a GGUF file, or a model on the hub. Reads at most the first bytes; no torch."""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint.disk import check_encoding, disk_errors
from surgery.checkpoint.hub import download, is_hub_id
from surgery.checkpoint.layout import ADAPTER, CONFIG, WEIGHT_FILES
from surgery.common.errors import SurgeryError

GGUF, MAGIC = ".gguf", b"GGUF"


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF, by suffix or magic number: Ollama names its files by hash."""
    if path.suffix.lower() == GGUF:
        return True
    with disk_errors(path), open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def find_gguf(path: Path) -> list[Path]:
    """List the GGUF files at a path: the file itself, or all in a folder that lacks config.json or other weights."""
    if path.is_file():
        return [path] if is_gguf(path) else []
    is_checkpoint = (path / CONFIG).exists() and any((path / name).exists() for name in WEIGHT_FILES)
    return [] if is_checkpoint else sorted(path.glob(f"*{GGUF}"))


def find_local(source: str | Path) -> Path | None:
    """Return the local checkpoint folder or GGUF file; None if it does not exist and may be a hub id.

    Raises SurgeryError: the path exists but is not a checkpoint, or is neither a path nor a hub id.
    """
    path = existing(source)
    if path is None:
        if existing(f"{source}{GGUF}"):
            raise SurgeryError(f"{source}: no such folder; did you mean {source}{GGUF}?")
        if str(source).lower().endswith(GGUF):
            raise SurgeryError(f"{source}: no such file; {_download_hint(str(source))}")
        if is_hub_id(str(source)):
            return None
        raise SurgeryError(f"{source}: no such folder; pass a checkpoint folder or a hub id such as org/name")
    if path.is_dir():
        check_folder(path)
        return path
    if is_gguf(path):
        return path
    raise SurgeryError.at(path, f"is a file; pass the checkpoint folder, or a {GGUF} file")


def _download_hint(name: str) -> str:
    """Return the hint for downloading a missing GGUF file."""
    repository, _, file = name.rpartition("/")
    if not is_hub_id(repository):
        repository, file = "org/name", "FILE.gguf"
    return f"check its path, or download it: hf download {repository} {file} --local-dir ."


def existing(name: str | Path) -> Path | None:
    """Return the path if it exists; None also for invalid paths: too long, with null bytes or of an unknown user."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def check_folder(path: Path) -> None:
    """Raise SurgeryError unless a folder holds a checkpoint or a GGUF file."""
    if (path / CONFIG).is_file() or find_gguf(path):
        return
    if (path / ADAPTER).is_file():
        raise SurgeryError.at(path, "contains an adapter, not a model; merge it into its base model and use the result")
    raise SurgeryError.at(path, f"no {CONFIG}; pass the folder of a Hugging Face checkpoint")


def locate(source: str | Path) -> Path:
    """Return the local folder or GGUF file of a checkpoint; downloads hub models.

    Raises SurgeryError: there is no such checkpoint.
    """
    path = find_local(source)
    if path is not None:
        check_encoding(path.absolute())
    if path is None:
        path = download(str(source))
        if not any((path / name).is_file() for name in (CONFIG, ADAPTER)):
            raise SurgeryError(
                f"{source}: no {CONFIG} on the hub; if it has GGUF files, download one: hf download {source} FILE.gguf "
                "--local-dir ."
            )
        check_folder(path)
    return path
