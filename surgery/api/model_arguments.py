"""Models as arguments of the package's functions, and the folders of their outputs.

A model is a folder, a GGUF file, a hub id, a name (``builtin``, ``smollm2``), a model of transformers in memory with
its tokenizer, or the result of another function.
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
    """A model where the commands can read it.

    Attributes:
        path: a folder, a GGUF file or a hub id.
        source: by what it can be read again when the work is done; None for one in memory.
        device: of a model in memory.
    """

    path: str
    source: Checkpoint | str | None
    device: str | None = None

    @property
    def name(self) -> str:
        """Name after which outputs are called."""
        return Path(self.path).stem if Path(self.path).is_file() else Path(self.path).name


@contextmanager
def on_disk(model: Model, tokenizer: PreTrainedTokenizerBase | None, *, tokenized: bool = True) -> Iterator[OnDisk]:
    """A model as files: where it is, or, of one in memory, in a temporary folder for the length of the block.

    Args:
        tokenizer: of a model in memory.
        tokenized: whether the work reads text, so that a model in memory needs its tokenizer.

    Raises:
        SurgeryError: it is no model, there is no such place, or it cannot be saved.
    """
    if isinstance(model, Checkpoint):
        yield OnDisk(str(model.path), model)
    elif isinstance(model, str | os.PathLike):
        path = model_named(os.fspath(model))
        find_local(path)  # refuses what is none before torch is loaded for it
        yield OnDisk(path, path)
    elif hasattr(model, "save_pretrained") and hasattr(model, "config"):
        if tokenized and tokenizer is None:
            raise SurgeryError("a model in memory has no text without its tokenizer: give tokenizer=...")
        with TemporaryFolder("model") as folder:
            path = Path(folder, Path(getattr(model.config, "name_or_path", "") or "model").name)
            _save(model, tokenizer, path)
            yield OnDisk(str(path), None, device=str(model.device))
    else:
        raise SurgeryError(
            f"a {type(model).__name__} is no model: give a folder, a hub id, builtin, smollm2, a model of transformers "
            "or a result of surgery's functions"
        )


@contextmanager
def placed(out: str | Path | None, name: str) -> Iterator[tuple[Path, TemporaryFolder | None]]:
    """Yield the output path: the user's, or a temporary folder, which is removed at once if the block fails."""
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
