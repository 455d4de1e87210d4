"""Training checkpoints from which an interrupted run resumes: folders that are written atomically.

A checkpoint holds the files of accelerate's `save_state` and, written last, `state.json` with the state of the loop.
Only trainable weights are saved; under FSDP every process writes its shard of all weights, in torch's format.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file

from surgery.checkpoint.disk import disk_errors, sync_folder, sync_tree
from surgery.common.errors import SurgeryError
from surgery.running.processes import ALONE, Processes

STATE = "state.json"
WEIGHTS = "trained.safetensors"
PREFIX = "step-"
BEST = "best"
"""Folder of the checkpoint with the best held-out loss."""


class Checkpoints:
    """Checkpoints of one run, in a folder that all its processes share. Every process must make every call."""

    def __init__(
        self, folder: Path, accelerator: Accelerator, *, processes: Processes = ALONE, keep_last: int = 2
    ) -> None:
        """Create the folder and hook into the accelerator, which has prepared the model.

        Raises SurgeryError: the folder cannot be created.
        """
        self.folder, self._accelerator, self._processes, self._keep_last = folder, accelerator, processes, keep_last
        self.last_good: Path | None = None
        self._sharded = accelerator.distributed_type == DistributedType.FSDP
        if not self._sharded:
            accelerator.register_save_state_pre_hook(self._save_trained)
            accelerator.register_load_state_pre_hook(self._load_trained)
        self._on_main(lambda: folder.mkdir(parents=True, exist_ok=True), folder)

    def save(self, state: Mapping[str, Any], name: str | None = None) -> Path:
        """Write a checkpoint and remove the oldest ones beyond `keep_last`.

        Args:
            state: JSON values, with "step", the number of completed steps.
            name: folder name of a checkpoint that `keep_last` does not count; None names it by its step.

        Raises:
            SurgeryError: the checkpoint cannot be written; earlier ones stay.
        """
        accelerator = self._accelerator
        path = self.folder / (name or f"{PREFIX}{state['step']:08d}")
        partial = path.with_name(f"{path.name}.partial")
        self._on_main(lambda: self._clear(partial), partial)
        with disk_errors(path):
            try:
                accelerator.save_state(str(partial), safe_serialization=True)
            except RuntimeError as error:  # torch raises it on a full disk
                raise SurgeryError.at(
                    path, f"the checkpoint cannot be written: {' '.join(str(error).split())}"
                ) from error
        accelerator.wait_for_everyone()
        self._on_main(lambda: self._finish(partial, path, state), path)
        if name is None:
            self.last_good = path
            self._on_main(self._remove_oldest, self.folder)
        return path

    def load(self, path: Path) -> dict[str, Any]:
        """Restore model, optimizer, scaler and random state; return the `state` that was passed to `save`.

        Raises SurgeryError: the checkpoint is damaged, or has other parameters.
        """
        state = read_state(path)
        if state is None:
            raise SurgeryError.at(path, "not a healing checkpoint, or damaged; remove it")
        try:
            # Optimizer states are pickles; only tensors and numbers are unpickled.
            self._accelerator.load_state(str(path))
        except (RuntimeError, ValueError, OSError, KeyError) as error:
            raise SurgeryError.at(
                path, f"cannot resume from this checkpoint: {' '.join(str(error).split())[:300]}"
            ) from error
        if path.name.startswith(PREFIX):
            self.last_good = path
        return state

    def latest(self, note: Callable[[str], None] = lambda text: None) -> Path | None:
        """Return the newest complete checkpoint (see `latest`) as the main process sees it, on every process."""
        return self._processes.from_main(lambda: latest(self.folder, note))

    def _save_trained(self, models: list, weights: list, folder: str) -> None:
        """Save hook of accelerate: write only the trainable weights."""
        weights.clear()
        if self._accelerator.is_main_process:
            tensors = {
                name: each.detach().cpu().clone().contiguous() for name, each in self._trained(models[0]).items()
            }
            save_file(tensors, Path(folder, WEIGHTS))

    def _load_trained(self, models: list, folder: str) -> None:
        """Load hook of accelerate: read the trainable weights."""
        model = models.pop()
        tensors, expected = load_file(Path(folder, WEIGHTS)), self._trained(model)
        if tensors.keys() != expected.keys() or any(tensors[name].shape != expected[name].shape for name in tensors):
            raise ValueError("its trained parameters differ from those of this run")
        with torch.no_grad():
            for name, parameter in expected.items():
                parameter.copy_(tensors[name])

    def _trained(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        parameters = self._accelerator.unwrap_model(model).named_parameters()
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}

    def _finish(self, partial: Path, path: Path, state: Mapping[str, Any]) -> None:
        files = {
            file.relative_to(partial).as_posix(): file.stat().st_size for file in partial.rglob("*") if file.is_file()
        }
        (partial / STATE).write_text(json.dumps({**state, "files": files}), encoding="utf-8")
        sync_tree(partial)
        if path.exists():
            shutil.rmtree(path)
        os.rename(partial, path)
        sync_folder(path.parent)

    def _remove_oldest(self) -> None:
        for path in sorted(self.folder.glob(f"{PREFIX}*[0-9]"))[: -self._keep_last]:
            shutil.rmtree(path)

    def _clear(self, partial: Path) -> None:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=True)

    def _on_main(self, function: Callable[[], None], path: Path) -> None:
        """Run a function on the main process; its error is raised on every process, so that none deadlocks."""

        def run() -> None:
            with disk_errors(path):
                function()

        self._processes.from_main(run)


def latest(folder: Path, note: Callable[[str], None] = lambda text: None) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None; damaged ones are skipped with a note."""
    for path in sorted(folder.glob(f"{PREFIX}*[0-9]"), reverse=True):
        if read_state(path) is not None:
            return path
        note(f"{path} is damaged; looking for an older checkpoint")
    return None


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the state that a checkpoint was saved with; None if a file is missing or has another size."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        files = state.pop("files")
        whole = all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return state if whole else None
