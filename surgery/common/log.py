"""A log of long work: each event one line for people, or one JSON object, at the end of a file.

The file and whether lines take the place of bars stand in the environment, so that processes that a command starts,
such as trainings, write into the same one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from surgery.common.environment import environment
from surgery.common.errors import SurgeryError
from surgery.common.human import duration, size
from surgery.common.memory import peak_memory
from surgery.common.visible import visible

LOG_FILE, VERBOSE = "SURGERY_LOG_FILE", "SURGERY_VERBOSE"
JSON_LINES = ".jsonl"


def is_verbose() -> bool:
    """Return whether standard error gets lines with times and memory, also on a terminal."""
    return VERBOSE in os.environ


def log(event: str, text: str, **facts: object) -> None:
    """Adds an event to the log, if there is one.

    Args:
        event: command, begin, going, end, stopped, note, error, done.
        text: for people.
        facts: plain values, for JSON.
    """
    path, now = os.environ.get(LOG_FILE), datetime.now(timezone.utc)
    if not path:
        return
    line = f"{now:%Y-%m-%d %H:%M:%S} {text}"
    if path.endswith(JSON_LINES):
        record = {"time": now.isoformat(timespec="milliseconds"), "event": event, "text": text, **facts}
        line = json.dumps(record, ensure_ascii=False)
    with suppress(OSError):  # a full disk ends what is worth more than a log by itself
        _append(path, line + "\n")


@contextmanager
def logged(command: str, file: Path | None, *, verbose: bool, **facts: object) -> Iterator[None]:
    """Log the work of the block; of several processes that do the same work, the first logs.

    Raises:
        SurgeryError: the file cannot be written.
    """
    began, variables = time.perf_counter(), {VERBOSE: "1"} if verbose else {}
    if file is not None and os.environ.get("RANK", "0") == "0":
        try:
            _append(str(file), "")
        except OSError as error:
            raise SurgeryError(f"--log-file {file}: {error.strerror or error}") from None
        variables[LOG_FILE] = str(file.absolute())
    with environment(**variables):
        try:
            log("command", command, **facts)
            yield
            seconds, peak = time.perf_counter() - began, peak_memory()
            summary = f"done in {duration(seconds)}, {size(peak)} at most"
            log("done", summary, seconds=round(seconds, 2), peak_bytes=peak)
        except SurgeryError as error:
            log("error", f"error: {error}")
            raise
        except KeyboardInterrupt:
            log("error", "interrupted")
            raise


def _append(path: str, text: str) -> None:
    # Opened for each line: several processes write into it, and forks of this one.
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(visible(text))
