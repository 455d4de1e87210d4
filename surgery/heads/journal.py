"""Journal from which an interrupted training of gates resumes: its state in one file, written atomically."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from surgery.checkpoint.disk import as_json, disk_errors, written_whole
from surgery.common.errors import SurgeryError
from surgery.common.interruption import resumes_from
from surgery.running.processes import ALONE, Processes

HEADER = "surgery-heads-journal"
"""Key of the JSON header in the metadata of the safetensors file."""


class Journal:
    """State of a training in a safetensors file while it runs.

    The main process reads and writes the file, and all processes receive its content. All processes must make every
    call but `get`.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, Any], processes: Processes = ALONE, *, restart: bool = False
    ) -> None:
        """Open the file, if it exists.

        Args:
            path: file; None to store nothing.
            identity: everything that determines the scores, as plain values: model, data, settings, seed.
            processes: processes that share the scoring.
            restart: delete an existing journal.

        Raises:
            SurgeryError: the file cannot be read, is not a journal, or has another identity.
        """
        self._path = path
        if path is not None:
            resumes_from(path)
        self._identity = as_json(identity)
        self._processes = processes
        self._state: dict[str, Tensor] | None = None
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
        self._state, self._before = stored["state"], stored["seconds"]

    def get(self) -> dict[str, Tensor] | None:
        """Return the tensors of the state, on the CPU; None if there is none."""
        return self._state

    @property
    def seconds(self) -> float:
        """Seconds of the scoring until now, including those before an interruption up to the last `put`."""
        return self._before + time.perf_counter() - self._start

    def put(self, state: Mapping[str, Tensor]) -> None:
        """Store copies of the tensors of a state, in place of the previous one.

        Raises SurgeryError: the file cannot be written; its previous content stays.
        """
        self._state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
        self._on_main(self._write)

    def remove(self) -> None:
        """Delete the state and the file."""
        self._state = None
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
                    state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
                return {"identity": header["identity"], "seconds": header["seconds"], "state": state}
            except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
                # Writes are atomic, so an interrupted run does not leave this: it may be a user's file.
                raise SurgeryError.at(
                    self._path, f"not a journal of surgery heads, or damaged ({error}); remove it"
                ) from None

    def _write(self) -> None:
        header = {"identity": self._identity, "seconds": self.seconds}
        with written_whole(self._path) as part:
            part.write_bytes(save(self._state, {HEADER: json.dumps(header)}))

    def _delete(self) -> None:
        with disk_errors(self._path):
            self._path.unlink(missing_ok=True)
