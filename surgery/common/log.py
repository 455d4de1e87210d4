"""Log file of long work: one line of text or one JSON object per event.

The log file and the verbose flag are environment variables, so that child processes, such as training runs, write to
the same file.
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
    """Return whether to print lines with times and memory to standard error instead of progress bars."""
    return VERBOSE in os.environ


def log(event: str, text: str, **facts: object) -> None:
    """Append an event to the log file, if there is one.

    Args:
        event: command, begin, going, end, stopped, note, error or done.
        text: human-readable message.
        facts: plain values for JSON.
    """
    path, now = os.environ.get(LOG_FILE), datetime.now(timezone.utc)
    if not path:
        return
    line = f"{now:%Y-%m-%d %H:%M:%S} {text}"
    if path.endswith(JSON_LINES):
        record = {"time": now.isoformat(timespec="milliseconds"), "event": event, "text": text, **facts}
        line = json.dumps(record, ensure_ascii=False)
    with suppress(OSError):  # a log that cannot be written must not stop the work
        _append(path, line + "\n")


@contextmanager
def logged(command: str, file: Path | None, *, verbose: bool, **facts: object) -> Iterator[None]:
    """Log the block from its command line to its end or error; in a distributed run only rank 0 logs.

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
    # Opened for each line: several processes, forks included, append to it.
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(visible(text))
