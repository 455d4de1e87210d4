"""Model arguments and output paths of the Python functions.

A model is a folder, a GGUF file, a hub id, a name (``builtin``, ``smollm2``), a transformers model in memory with its
tokenizer, or the result of another function.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from surgery.api.results import Checkpoint
from surgery.checkpoint.location import find_local
from surgery.checkpoint.named_models import model_named
from surgery.common.errors import SurgeryError
from surgery.common.temporary import TemporaryFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Model: TypeAlias = Union[str, "os.PathLike[str]", "PreTrainedModel", Checkpoint]


@dataclass(frozen=True)
class OnDisk:
    """Model on disk or on the hub, as the commands read it.

    Attributes:
        path: folder, GGUF file or hub id.
        source: the model argument, which stays valid after the block; None for a model in memory.
        device: device of a model in memory.
    """

    path: str
    source: Checkpoint | str | None
    device: str | None = None

    @property
    def name(self) -> str:
        """Base name for outputs."""
        return Path(self.path).stem if Path(self.path).is_file() else Path(self.path).name


@contextmanager
def on_disk(model: Model, tokenizer: PreTrainedTokenizerBase | None, *, tokenized: bool = True) -> Iterator[OnDisk]:
    """Yield a model as files; a model in memory is saved to a temporary folder for a ``with`` block.

    Args:
        tokenizer: tokenizer of a model in memory.
        tokenized: whether the command reads text, so that a model in memory needs its tokenizer.

    Raises:
        SurgeryError: the argument is not a model, the path does not exist, or the model cannot be saved.
    """
    if isinstance(model, Checkpoint):
        yield OnDisk(str(model.path), model)
    elif isinstance(model, str | os.PathLike):
        path = model_named(os.fspath(model))
        find_local(path)  # raises for a missing path before torch is imported
        yield OnDisk(path, path)
    elif hasattr(model, "save_pretrained") and hasattr(model, "config"):
        if tokenized and tokenizer is None:
            raise SurgeryError("a model in memory needs its tokenizer for text: pass tokenizer=...")
        with TemporaryFolder("model") as folder:
            path = Path(folder, Path(getattr(model.config, "name_or_path", "") or "model").name)
            _save(model, tokenizer, path)
            yield OnDisk(str(path), None, device=str(model.device))
    else:
        raise SurgeryError(
            f"unsupported model type {type(model).__name__}: pass a folder, a hub id, builtin, smollm2, a "
            "transformers model or a result of surgery's functions"
        )


@contextmanager
def output_path(out: str | Path | None, name: str) -> Iterator[tuple[Path, TemporaryFolder | None]]:
    """Yield the output path: the user's, or ``name`` in a temporary folder, which is removed if the block fails."""
    if out is not None:
        yield Path(out), None
        return
    temporary = TemporaryFolder("result")
    try:
        yield temporary.path / name, temporary
    except BaseException:
        temporary.remove()
        raise


def _save(model: Any, tokenizer: Any, path: Path) -> None:
    from surgery.running.loading import LOADING

    try:
        for part in (model, tokenizer):
            if part is not None:
                part.save_pretrained(path)
    except LOADING as error:
        reason = " ".join(str(error).split())[:300]
        raise SurgeryError(f"the model in memory cannot be saved ({reason})") from error
