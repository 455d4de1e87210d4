"""Download of checkpoints from the Hugging Face hub."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from surgery.common.errors import SurgeryError

_FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.spm", "*.txt", "*.jinja", "*.py", "*.md"]
_FILES += ["LICENSE*", "NOTICE*", "USE_POLICY*"]
# Duplicate weights: Mistral's native format, exports in subfolders.
_UNWANTED = ["consolidated*", "*/*.safetensors", "*/*.bin"]


def is_hub_id(source: str) -> bool:
    """Return whether ``source`` has the form ``org/name``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source) is not None


def is_downloaded(name: str) -> bool:
    """Return whether :func:`download` fetches a file of a repository, by its path in the repository."""
    return any(fnmatch(name, kind) for kind in _FILES) and not any(fnmatch(name, kind) for kind in _UNWANTED)


def download(repo: str, *, revision: str | None = None) -> Path:
    """Download a checkpoint's weights, configs, tokenizer and code to the hub's cache and return its folder.

    Raises SurgeryError: the repository does not exist, access is denied, or the network fails.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=_FILES, ignore_patterns=_UNWANTED)
    except Exception as error:  # errors of the hub, its HTTP library or the disk
        raise SurgeryError(f"{repo}: no such folder, and the hub says: {reason(error)}") from error
    return Path(folder)


def id_of_snapshot(path: Path) -> tuple[str, str] | None:
    """Return repository and revision of a cache path ``models--org--name/snapshots/revision``; None for other paths."""
    if path.parent.name != "snapshots" or not path.parent.parent.name.startswith("models--"):
        return None
    return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1), path.name


def reason(error: Exception) -> str:
    """Describe an error of the hub, its HTTP library or the disk in one line."""
    from huggingface_hub import errors

    # GatedRepoError is a subclass of RepositoryNotFoundError.
    if isinstance(error, errors.GatedRepoError):
        return "access is gated; accept its terms on huggingface.co and run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the model does not exist or is private; check the name or run `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the hub is not reachable and the model is not in the cache; check the path or the network"
    detail = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {detail}" if detail else type(error).__name__
