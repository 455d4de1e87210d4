"""Journal from which an interrupted scoring resumes: named tensors in one file, written atomically."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from surgery.checkpoint.disk import as_json, disk_errors, written_whole
from surgery.checkpoint.tensors import as_bytes, describe
from surgery.common.errors import SurgeryError
from surgery.common.interruption import resumes_from
from surgery.common.other_threads import other_threads
from surgery.running.processes import ALONE, Processes

HEADER = "surgery-heads-journal"
"""Key of the JSON header in the metadata of the safetensors file."""

SECONDS = "seconds_so_far"
"""Key in the facts of each entry: seconds of the scoring so far."""


class Journal:
    """Key-value store of tensors in a safetensors file while a scoring runs.

    The main process reads and writes the file, and all processes receive its content. All processes must make every
    call but `get`.
    """

    def __init__(
        self,
        path: Path | None,
        identity: Mapping[str, Any],
        processes: Processes = ALONE,
        note: Callable[[str], None] = lambda text: None,
        *,
        restart: bool = False,
    ) -> None:
        """Open the file, if it exists.

        Args:
            path: file; None to store nothing.
            identity: everything that determines the scores, as plain values: model, data, settings, seed.
            processes: processes that share the scoring.
            note: receives warnings: a damaged file, another number of threads.
            restart: delete an existing journal.

        Raises:
            SurgeryError: the file cannot be read, is not a journal, or has another identity.
        """
        self._path = path
        if path is not None:
            resumes_from(path)
        self._identity = as_json(identity)
        self._processes = processes
        self._entries: dict[str, dict[str, Tensor]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._before, self._start = 0.0, time.perf_counter()
        stored = self._on_main(self._read)
        if stored is None:
            return
        if restart:
            self._on_main(self._delete)
            return
        if stored["identity"] != self._identity:
            raise SurgeryError.at(
                path,
                "contains unfinished work with another model, data or settings; use the same to resume it, pass"
                " --restart to discard it, or choose another --out",
            )
        if not stored["whole"]:
            note(f"{path}: damaged; starting from scratch")
            return
        if warning := other_threads(stored.get("threads"), torch.get_num_threads()):
            note(f"{path}: {warning}")
        self._entries, self._facts = stored["entries"], stored["facts"]
        self._before = max((facts.get(SECONDS, 0.0) for facts in self._facts.values()), default=0.0)

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors under a key, on the CPU; None if there are none."""
        return self._entries.get(key)

    @property
    def seconds(self) -> float:
        """Seconds of the scoring until now, including those before an interruption up to the last `put`."""
        return self._before + time.perf_counter() - self._start

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store copies of tensors under a key, replacing its previous entry.

        Raises:
            SurgeryError: the file cannot be written; its previous content stays.
        """
        self._entries[key] = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        self._facts[key] = {SECONDS: self.seconds}
        self._on_main(self._write)

    def remove(self) -> None:
        """Delete all entries and the file."""
        self._entries, self._facts = {}, {}
        self._on_main(self._delete)

    def _on_main(self, function: Callable[[], Any]) -> Any:
        return None if self._path is None else self._processes.from_main(function)

    def _read(self) -> dict[str, Any] | None:
        with disk_errors(self._path):
            if not self._path.exists():
                return None
            try:
                with safe_open(self._path, framework="pt") as file:
                    header = json.loads(file.metadata()[HEADER])
                    entries = {
                        key: {name: file.get_tensor(f"{key}/{name}") for name in names}
                        for key, names in header["tensors"].items()
                    }
                content = {"identity": header["identity"], "facts": header["facts"], "entries": entries}
                whole = header.get("sha256") == _digest(entries, header["facts"])
                return {**content, "threads": header.get("threads"), "whole": whole}
            except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
                # Writes are atomic, so an interrupted run does not leave this: it may be a user's file.
                raise SurgeryError.at(
                    self._path, f"not a journal of surgery heads, or damaged ({error}); remove it"
                ) from None

    def _write(self) -> None:
        header = {
            "identity": self._identity,
            "facts": self._facts,
            "threads": torch.get_num_threads(),
            "sha256": _digest(self._entries, self._facts),
            "tensors": {key: list(tensors) for key, tensors in self._entries.items()},
        }
        tensors = {
            f"{key}/{name}": tensor for key, entries in self._entries.items() for name, tensor in entries.items()
        }
        with written_whole(self._path) as part:
            part.write_bytes(save(tensors, {HEADER: json.dumps(header)}))

    def _delete(self) -> None:
        with disk_errors(self._path):
            self._path.unlink(missing_ok=True)


def _digest(entries: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of entries and facts."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for key, tensors in sorted(entries.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(f"\n{json.dumps([key, name])} {describe(tensor)} ".encode())
            digest.update(as_bytes(tensor).numpy())
    return digest.hexdigest()
