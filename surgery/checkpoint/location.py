"""Location of a checkpoint: a folder, a GGUF file, or a model on the hub. Looks at names alone, without torch."""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint.disk import check_encoding
from surgery.checkpoint.hub import download, is_hub_id
from surgery.checkpoint.layout import ADAPTER, CONFIG
from surgery.common.errors import SurgeryError

GGUF = ".gguf"


def find_gguf(path: Path) -> list[Path]:
    """The file itself, or those of a folder that has no config.json."""
    if path.is_file():
        return [path] if path.suffix == GGUF else []
    return [] if (path / CONFIG).exists() else sorted(path.glob(f"*{GGUF}"))


def find_local(source: str | Path) -> Path | None:
    """The folder or GGUF file of that name; None where there is none and it may be a hub id.

    Raises:
        SurgeryError: it is neither, or no checkpoint.
    """
    path = existing(source)
    if path is None:
        if is_hub_id(str(source)):
            return None
        raise SurgeryError(f"{source}: no such folder; give a checkpoint's folder or a hub id such as org/name")
    if path.is_dir():
        check_folder(path)
        return path
    if path.suffix == GGUF:
        return path
    raise SurgeryError.at(path, f"is a file; give the folder of the checkpoint, or a {GGUF} file")


def existing(name: str | Path) -> Path | None:
    """Return the path if it exists; None where it does not or cannot: a name too long, with null bytes or of an unknown
    user."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def check_folder(path: Path) -> None:
    """Raises SurgeryError unless a folder holds a checkpoint or a GGUF file."""
    if (path / CONFIG).is_file() or find_gguf(path):
        return
    if (path / ADAPTER).is_file():
        raise SurgeryError.at(path, "holds an adapter, not a model; merge it into its model and give that")
    raise SurgeryError.at(path, f"no {CONFIG}; give the folder of a Hugging Face checkpoint")


def locate(source: str | Path, *, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """The local folder of a checkpoint or its GGUF file, downloaded first where it is a hub model.

    Raises:
        SurgeryError: there is no such checkpoint.
    """
    path = find_local(source)
    if path is not None:
        check_encoding(path.absolute())
    if path is None:
        path = download(str(source), revision=revision, allow_pickle=allow_pickle)
        check_folder(path)
    elif revision is not None and path.is_dir():
        raise SurgeryError.at(path, f"is a local folder, which has no revision {revision!r}; drop --revision")
    return path
