"""`tools/gpu.py run`: runs the steps within a time limit and saves every row immediately."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from gpu_steps import ROOT, SPARE, STEPS, Setup, Step

from surgery.checkpoint.named_models import demo_model
from surgery.common.errors import SurgeryError

RESULTS, LOG, MANIFEST = "results.jsonl", "run.log", "manifest.json"
POLL = 0.25
LEAST = 20.0
"""Minimum remaining seconds to start a step."""


class Process(Protocol):
    """Interface of a running step."""

    def poll(self) -> int | None: ...

    def send(self, number: signal.Signals) -> None: ...


class Started(subprocess.Popen):
    """Process in a new session, so that its child processes can be terminated with it."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@dataclass
class Records:
    """Reader of a step's result files in a folder that returns each row once, while the step still writes.

    They are JSON files with "rows", or JSON Lines files; names separated by ``|`` are one file, moved when the step
    ends.
    """

    work: Path
    files: tuple[str, ...]
    _emitted: dict[str, int] = field(default_factory=dict)

    def new(self) -> list[dict[str, Any]]:
        """Return the rows that were not returned before."""
        rows = []
        for file in self.files:
            current = next(filter(None, (_rows_of(self.work / name) for name in file.split("|"))), [])
            rows += current[self._emitted.get(file, 0) :]
            self._emitted[file] = max(len(current), self._emitted.get(file, 0))
        return rows

    def forget(self) -> None:
        """Delete files of an earlier attempt, whose rows were returned then."""
        for name in (name for file in self.files for name in file.split("|")):
            (self.work / name).unlink(missing_ok=True)


def _rows_of(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return []
    if file.suffix == ".jsonl":
        # The last line may be incomplete.
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    try:
        record = json.loads(text)
    except ValueError:
        return []
    if "rows" in record:
        return record["rows"]
    return [{name: value for name, value in record.items() if name not in ("layers", "files", "stages")}]


def start(arguments: list[str], environment: dict[str, str], log: Path) -> Started:
    """Start a Python process that writes to the log."""
    with log.open("ab") as file:
        return Started(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def run(
    seconds: float,
    max_files: int,
    out: Path,
    pack: Path,
    work: Path,
    steps: str | None,
    device: str,
    tiny: bool,
    starter: Callable[[list[str], dict[str, str], Path], Process] = start,
) -> None:
    """Run the steps that are not done, in order, within ``seconds``, and write two files to ``out``: rows and the log.

    ``pack`` holds parts from `tools/gpu.py pack`, which may be incomplete; later runs reuse ``work``. ``steps`` are
    comma-separated names, None for all; ``tiny`` rehearses; ``starter`` starts a process. Raises SurgeryError: an
    unknown step, too few files, or a damaged part.
    """
    if max_files < 2:
        raise SurgeryError(f"--max-files {max_files}: must be at least 2, for the rows and the log")
    selection = _selected_steps(steps)
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    results = out / RESULTS
    environment = _environment(work, device)
    model = _arrived(pack, work)
    if (wheels := work / "wheels").is_dir() and not (work / "site").exists():
        _install(wheels, work / "site")
    setup = Setup(work, device, tiny, demo_model() if tiny else model)
    _write(results, {"event": "run", "command": " ".join(sys.argv), "commit": commit(work), "tiny": tiny, **_now()})
    for step in selection:
        remaining = seconds - (time.monotonic() - began)
        marker = work / "done" / step.name
        if marker.exists():
            continue
        if step.needs_model and setup.model is None:
            _write(results, {"event": "waits", "step": step.name, "why": "the model's parts have not all arrived"})
            continue
        if remaining < LEAST:
            _write(results, {"event": "waits", "step": step.name, "why": "no time is left in this run"})
            continue
        limit = min(remaining, step.seconds * (4 if tiny else 1))
        if _run_step(step, setup, limit, environment, results, out / LOG, starter):
            marker.parent.mkdir(exist_ok=True)
            marker.touch()
    _write(results, {"event": "end", "seconds": round(time.monotonic() - began, 1)})


def _run_step(
    step: Step,
    setup: Setup,
    limit: float,
    environment: dict[str, str],
    results: Path,
    log: Path,
    starter: Callable[[list[str], dict[str, str], Path], Process],
) -> bool:
    """Run a step until it ends or reaches its limit; return whether its exit code is 0."""
    records = Records(setup.work, step.records)
    records.forget()
    arguments = step.arguments(setup, max(1.0, limit - SPARE))
    _write(results, {"event": "begin", "step": step.name, "limit": round(limit, 1), "arguments": arguments, **_now()})
    print(f"{step.name}, at most {limit:.0f} s", flush=True)
    began, cut, programs = time.monotonic(), False, _programs(environment)
    process = starter(arguments, {**environment, **step.environment(setup)}, log)
    while (code := process.poll()) is None:
        time.sleep(POLL)
        _write(results, *({"step": step.name, "row": row} for row in records.new()))
        over = time.monotonic() - began - limit
        # SIGINT first, so that the step reports its results so far.
        if over > 0 and not cut:
            process.send(signal.SIGINT)
            cut = True
        elif over > SPARE / 2:
            process.send(signal.SIGKILL)
    _write(results, *({"step": step.name, "row": row} for row in records.new()))
    took = round(time.monotonic() - began, 1)
    programs = _programs(environment) - programs
    ended = {"event": "ended", "step": step.name, "code": code, "seconds": took, "cut": cut, "programs": programs}
    _write(results, ended)
    print(f"{step.name}: exit code {code} after {took:.0f} s{' (time limit)' if cut else ''}", flush=True)
    return code == 0


def _programs(environment: dict[str, str]) -> int:
    """Count the programs in Triton's cache; a step that adds programs compiled them while the GPU was idle."""
    return sum(1 for _ in Path(environment["TRITON_CACHE_DIR"]).glob("*/*.cubin"))


def _selected_steps(names: str | None) -> list[Step]:
    steps = {step.name: step for step in STEPS}
    selected_names = list(steps) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in selected_names if name not in steps]:
        raise SurgeryError(f"--steps {unknown[0]}: unknown; choose from {', '.join(steps)}")
    return [steps[name] for name in selected_names]


def _arrived(pack: Path, work: Path) -> Path | None:
    """Copy the available parts to the work folder; return the model's file once all have arrived.

    Raises SurgeryError: the joined model does not match its SHA-256.
    """
    for part in sorted(pack.glob("part-*")):
        shutil.copytree(part, work, dirs_exist_ok=True)
    if not (work / MANIFEST).is_file():
        return None
    facts = json.loads((work / MANIFEST).read_text(encoding="utf-8"))
    model = work / facts["model"]
    if model.exists():
        return model
    pieces = [work / "model" / f"piece-{number}" for number in range(facts["pieces"])]
    if not all(piece.exists() for piece in pieces):
        return None
    digest = hashlib.sha256()
    with model.with_suffix(".joining").open("wb") as file:
        for piece in pieces:
            content = piece.read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != facts["sha256"]:
        raise SurgeryError(f"{work / 'model'}: the parts do not match the packed model; copy them again")
    return model.with_suffix(".joining").rename(model)


def _install(wheels: Path, site: Path) -> None:
    """Unpack wheels into a folder that precedes installed packages on the path; needs no pip."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def _environment(work: Path, device: str) -> dict[str, str]:
    paths = [str(work / "site"), str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **({"TRITON_INTERPRET": "0"} if device.startswith("cuda") else {}),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**inherited, **own, "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(work / "triton"))}


def commit(work: Path | None = None) -> str | None:
    """Return the commit that was packed, or that of the checkout without a pack."""
    with suppress(OSError, TypeError):
        if packed := json.loads((work / MANIFEST).read_text(encoding="utf-8")).get("commit"):
            return packed
    with suppress(OSError):
        process = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return process.stdout.strip() or None
    return None


def _now() -> dict[str, str]:
    return {"at": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _write(results: Path, *rows: dict[str, Any]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
