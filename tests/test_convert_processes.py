"""Several processes share a conversion's calibration and fits, and the result has the bits of one process."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from processes import AT_ONCE, Fork, two_forks

import surgery
from surgery.calibration.parts import PARTS, Parts
from surgery.calibration.sweep import BoundaryStore
from surgery.running.activations import ActivationMemory
from surgery.running.processes import Processes
from surgery.running.threads import torch_threads

# More sequences than parts, of which the last are shorter; attention over lags.
TEXT = ["--calibration-tokens", "288", "--calibration-length", "32", "--held-out", "1", "--batch-size", "1"]
ASKED = ["--to", "mla", "--kv-ratio", "0.5", "--rope-dim", "4", *TEXT]


def results(out):
    """The weights' bytes, and what the report measured."""
    report = json.loads((out / "surgery_report.json").read_text())
    return (out / "model.safetensors").read_bytes(), [report[name] for name in ("layers", "ladder", "target")]


def statistics(folder):
    """Every statistic of every layer."""
    (kept,) = folder.iterdir()
    layers = [torch.load(path, weights_only=True) for path in sorted(kept.glob("*.pt"))]
    return {
        (layer, kind, name): value
        for layer, found in enumerate(layers)
        for kind in ("statistics", "lags")
        for name, value in found[kind].items()
    }


def convert_alone(*verb):
    fork = Fork("convert", *verb, module="surgery")
    assert fork.wait() == 0, fork.stderr[-2000:]


@pytest.mark.parametrize("limit", [(), pytest.param(("--activation-memory", "1KB"), marks=pytest.mark.slow)])
def test_two_processes_give_the_bits_of_one(checkpoints, tmp_path, limit):
    kept = ["--keep-statistics", tmp_path / "kept-1"], ["--keep-statistics", tmp_path / "kept-2"]
    convert_alone(checkpoints("qwen3"), *ASKED, *kept[0], "--out", tmp_path / "one" / "small")
    main, other = two_forks(
        "convert", checkpoints("qwen3"), *ASKED, *kept[1], *limit, "--out", tmp_path / "two" / "small"
    )
    assert "calibrate: backward" in main.stderr and main.stdout
    assert not other.stdout and "calibrate" not in other.stderr
    one, two = (statistics(tmp_path / f"kept-{count}") for count in (1, 2))
    assert one.keys() == two.keys() and any(isinstance(value, torch.Tensor) for value in one.values())
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        assert same, name
    assert results(tmp_path / "one" / "small") == results(tmp_path / "two" / "small")


def test_what_is_refused_is_said_once(checkpoints, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "mine").touch()
    with pytest.raises(AssertionError, match="surgery: error: "):
        two_forks("convert", checkpoints("llama"), *ASKED, "--out", tmp_path / "two")
    assert os.listdir(tmp_path) == ["two"]


class Of(Processes):
    """One of several that do not exist."""

    def __init__(self, rank, count):
        super().__init__(alone=True)
        self.rank, self.count = rank, count


@pytest.mark.parametrize(("sequences", "batch", "count"), [(19, 2, 2), (19, 2, 3), (5, 2, 4), (1, 4, 2), (24, 1, 8)])
def test_every_sequence_is_of_one_process(sequences, batch, count, tmp_path):
    rows = torch.arange(sequences)[:, None]
    shares = [Parts(sequences, batch, Of(rank, count)) for rank in range(count)]
    memory = ActivationMemory(None, tmp_path)
    assert sorted(each for parts in shares for each in parts.pick(rows, memory).flatten().tolist()) == list(
        range(sequences)
    )
    alone = Parts(sequences, batch)
    assert alone.count == min(PARTS, -(-sequences // batch)) == len({part for each in shares for part in each.own})
    together = {part: parts for parts in shares for part in parts.own}
    batches = [rows for part in range(alone.count) for rows, _ in together[part].batches(part)]
    assert batches == [slice(start, min(start + batch, sequences)) for start in range(0, sequences, batch)]
    with BoundaryStore() as store:
        for parts in reversed(shares):
            own = parts.pick(rows.float()[..., None], memory)
            for part in parts.own:
                store.save(0, own[parts.own_rows(part)], parts.rows(part).start, sequences)
        assert torch.equal(store.load(0), rows.float()[..., None])


def started(*verb, **options):
    """`surgery convert` in a process of its own, once it has others beside it."""
    command = [sys.executable, "-m", "surgery", "convert", *map(str, verb)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes, **options)
    while process.poll() is None:
        if children := psutil.Process(process.pid).children():
            return process, children
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


PHASES = "begin", "calibrate: forward", "calibrate: backward"


@pytest.mark.slow
def test_started_by_the_verb(checkpoints, tmp_path):
    process, workers = started(checkpoints("qwen3"), *ASKED, "--processes", "3", "--out", tmp_path / "three" / "small")
    assert len(workers) <= 2
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    convert_alone(checkpoints("qwen3"), *ASKED, "--out", tmp_path / "one" / "small")
    assert results(tmp_path / "one" / "small") == results(tmp_path / "three" / "small")


@pytest.mark.slow
def test_started_from_a_program(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before, children = dict(os.environ), psutil.Process().children()
    few = {"kv_ratio": 0.5, "calibration_tokens": 512, "calibration_length": 64, "held_out": 1}
    places = tmp_path / "one" / "small", tmp_path / "two" / "small"
    with torch_threads(1):
        for count, out in enumerate(places, 1):
            surgery.convert("builtin", "lowrank", out=out, processes=count, progress=False, **few)
    assert results(places[0]) == results(places[1])
    assert dict(os.environ) == before and set(psutil.Process().children()) <= set(children)
    assert not torch.distributed.is_initialized() and Processes().count == 1


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_ends_all_with_one_line(checkpoints, tmp_path, number, phase):
    long = [*ASKED, "--calibration-tokens", "32768", "--processes", "2", "--verbose"]
    process, (worker,) = started(checkpoints("llama"), *long, "--out", tmp_path / "out")
    seen = ""
    while phase not in seen and phase != "begin":
        seen = process.stderr.readline()
    worker.send_signal(number)
    _, errors = process.communicate(timeout=60)
    said = [line for line in errors.splitlines() if "error" in line]
    assert process.returncode == 1 and len(said) == 1, errors
    assert said[0].startswith("surgery: error: process 2 was ended by SIG")
    assert not worker.is_running() and set(os.listdir(tmp_path)) <= {"out.partial"}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_of_a_terminal_ends_all_with_one_line(checkpoints, tmp_path, phase):
    """A terminal sends it to every process of the group at once."""
    long = [*ASKED, "--calibration-tokens", "32768", "--processes", "3", "--verbose"]
    process, workers = started(checkpoints("llama"), *long, "--out", tmp_path / "out", start_new_session=True)
    seen = ""
    while phase not in seen and phase != "begin":
        seen = process.stderr.readline()
    workers = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    said = [line for line in errors.splitlines() if line.startswith("surgery:") or "Traceback" in line]
    left = os.listdir(tmp_path)
    assert len(said) == 1 and (f"{tmp_path / 'out.partial'} keeps" if left else "nothing was kept") in said[0], errors
    assert process.returncode == 130 and not any(worker.is_running() for worker in workers)
    assert set(left) <= {"out.partial"}


@pytest.mark.slow
def test_the_others_end_with_the_one_that_started_them(checkpoints, tmp_path):
    long = [*ASKED, "--calibration-tokens", "32768", "--processes", "3", "--verbose"]
    process, _ = started(checkpoints("llama"), *long, "--out", tmp_path / "out")
    while "calibrate: backward" not in process.stderr.readline():
        assert process.poll() is None
    workers = psutil.Process(process.pid).children()
    process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert len(workers) == 2 and not alive


@pytest.mark.slow
def test_killed_with_two_processes_and_resumed_with_one(checkpoints, tmp_path):
    """Every layer is a state; killed after some, it goes on with any number of processes."""
    verb = ["convert", checkpoints("llama"), *ASKED, "--verbose", "--out"]
    convert_alone(*verb[1:], tmp_path / "whole" / "small")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for phase in ("forward: 1 of 2", "backward: 1 of 2", "backward: 2", "convert: 1 of 2", None):
        command = [
            sys.executable,
            "-c",
            AT_ONCE,
            *map(str, verb),
            str(tmp_path / "again" / "small"),
            "--processes",
            "2",
        ]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        while phase and (line := process.stderr.readline()):
            if phase in line:
                process.kill()
        process.communicate()
    assert results(tmp_path / "again" / "small") == results(tmp_path / "whole" / "small")
