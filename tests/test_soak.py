"""Conversions, slices and evaluations in random order in one folder, half of them ended by a signal and gone on with.

    SURGERY_SOAK=200 pytest -n 0 -m slow tests/test_soak.py

Every result is that of an undisturbed run; nothing stays in the folder, among temporary files, open or running; memory
does not grow.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from processes import AT_ONCE, Fork

from surgery.cli.program import main
from surgery.heads.pattern import HeadPattern

COUNT = int(os.environ.get("SURGERY_SOAK", "16"))
SEED = int(os.environ.get("SURGERY_SOAK_SEED", "0"))
ENDINGS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TEXT = ["--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "2"]
# What runs may add to the memory of a process, each; allocators and caches of torch move by more from run to run.
GROWTH = 0.5 * 2**20


def in_process(*arguments) -> None:
    """`surgery ARGUMENTS`, which has to end well."""
    sys.argv[:] = ["surgery", *map(str, arguments)]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)


def digest(out: Path) -> str:
    """Hash a checkpoint without times and durations, and an evaluation's measurements."""
    result = hashlib.sha256()
    if (out / "report.json").exists():
        rows = json.loads((out / "report.json").read_text())["rows"]
        result.update(json.dumps([[row["name"], row["kv"], row["results"]["loss"]] for row in rows]).encode())
        return result.hexdigest()
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name not in ("surgery_report.json", "README.md"):
            result.update(path.relative_to(out).as_posix().encode() + path.read_bytes())
    return result.hexdigest()


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children() -> set[str]:
    """Process ids of this process's children, the dead among them."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def slope(values: list[int]) -> float:
    """Return the slope of a line through values one apart."""
    return statistics.linear_regression(range(len(values)), values).slope


@pytest.fixture
def operations(checkpoints, tmp_path):
    """Return the commands of `surgery`, without their outputs."""
    source, result = checkpoints("llama"), tmp_path / "made"
    HeadPattern(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), "needle", 3, 20).save(tmp_path / "heads.safetensors")
    settings = {
        "mla": ["--kv-ratio", "0.5"],
        "gqa": ["--kv-heads", "1"],
        "lowrank": ["--kv-ratio", "0.5"],
        "crosslayer": ["--kv-ratio", "0.5", "--method", "cascade", "--group-size", "2"],
        "hybrid": ["--heads", tmp_path / "heads.safetensors", "--streaming", "0.5"],
        "quantized": ["--bits", "4"],
    }
    results = {name: ["convert", source, "--to", name, *more, *TEXT] for name, more in settings.items()}
    in_process(*results["lowrank"], "--out", result)
    results["slice"] = ["slice", result, "--kv-ratio", "0.25", *TEXT]
    results["eval"] = ["eval", result, "--baseline", source, "--tasks", "loss", "--windows", "2", "--length", "64"]
    results["eval"] += ["--variants", "none"]
    return results


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_nothing_is_left_and_every_result_is_right(operations, tmp_path, monkeypatch):
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir(), temporary.mkdir()
    assert Fork(code="").wait() == 0  # what forks has its own temporary folder
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    draw, expected, seconds, memory, ended = random.Random(SEED), {}, {}, [], 0
    for name, call in operations.items():
        began = time.monotonic()
        in_process(*call, "--out", work / name)
        expected[name], seconds[name] = digest(work / name), time.monotonic() - began
        shutil.rmtree(work / name)
    values, running = len(os.listdir("/proc/self/fd")), children()
    for number in range(COUNT):
        name = draw.choice(list(operations))
        call = [*operations[name], "--out", work / name]
        if draw.random() < 0.5:
            fork = Fork(*call, code=AT_ONCE)
            time.sleep(draw.uniform(0, seconds[name]))
            if fork.poll() is None:
                os.kill(fork.pid, draw.choice(ENDINGS))
            if fork.wait():
                ended += 1
                again = Fork(*call, code=AT_ONCE)
                assert again.wait() == 0, (number, name, again.stderr[-3000:])
            fork = again = None  # and their files
        else:
            in_process(*call)
            memory.append(resident())
        assert digest(work / name) == expected[name], (number, name)
        shutil.rmtree(work / name)
        assert not list(work.iterdir()), (number, name)
        assert not list(temporary.iterdir()), (number, name)
    print(f"seed {SEED}: {COUNT} runs, {ended} ended by signals and gone on with")
    assert len(os.listdir("/proc/self/fd")) <= values
    assert children() == running
    if len(memory) >= 40:
        print(f"memory: {slope(memory[len(memory) // 2 :]) / 2**20:+.3f} MiB a run")
        assert slope(memory[len(memory) // 2 :]) < GROWTH
