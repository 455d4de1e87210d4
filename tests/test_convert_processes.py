"""Several processes share a conversion's calibration and fits, and the result has the bits of one process."""

import os
import signal
import time

import pytest
import torch
from conversions import results
from processes import AT_ONCE, Fork, started_forks, two_forks
from tiny_models import HELD_OUT

from surgery.calibration.parts import PARTS, Parts
from surgery.calibration.sweep import BoundaryStore
from surgery.running.activations import ActivationMemory
from surgery.running.processes import Processes

# More sequences than parts, of which the last are shorter; attention over lags.
TEXT = ["--calibration-tokens", "288", "--calibration-length", "32", "--held-out", "1", "--batch-size", "1"]
TEXT += ["--calibration", HELD_OUT]
ASKED = ["--to", "mla", "--kv-ratio", "0.5", "--rope-dim", "4", *TEXT]


def statistics(folder):
    """Every statistic of every layer."""
    (entries,) = folder.iterdir()
    layers = [torch.load(path, weights_only=True) for path in sorted(entries.glob("*.pt"))]
    return {
        (layer, kind, name): value
        for layer, result in enumerate(layers)
        for kind in ("statistics", "lags")
        for name, value in result[kind].items()
    }


def convert_alone(*verb):
    fork = Fork("convert", *verb, module="surgery")
    assert fork.wait() == 0, fork.stderr[-2000:]


@pytest.mark.parametrize("limit", [(), pytest.param(("--activation-memory", "1KB"), marks=pytest.mark.slow)])
def test_two_processes_give_the_bits_of_one(checkpoints, tmp_path, limit):
    entries = ["--keep-statistics", tmp_path / "kept-1"], ["--keep-statistics", tmp_path / "kept-2"]
    convert_alone(checkpoints("qwen3"), *ASKED, *entries[0], "--out", tmp_path / "one" / "small")
    main, other = two_forks(
        "convert", checkpoints("qwen3"), *ASKED, *entries[1], *limit, "--out", tmp_path / "two" / "small"
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


@pytest.mark.slow
def test_killed_with_two_processes_and_resumed_with_one(checkpoints, tmp_path):
    """Every layer is a state; killed after some, it goes on with any number of processes."""
    verb = ["convert", checkpoints("llama"), *ASKED, "--verbose", "--out"]
    convert_alone(*verb[1:], tmp_path / "whole" / "small")
    for phase in ("forward: 1 of 2", "backward: 1 of 2", "backward: 2", "convert: 1 of 2"):
        forks = started_forks(*verb, tmp_path / "again" / "small", code=AT_ONCE)
        while phase not in forks[0].stderr and forks[0].poll() is None:
            time.sleep(0.02)
        for fork in forks:
            os.kill(fork.pid, signal.SIGKILL)
            fork.wait()
    convert_alone(*verb[1:], tmp_path / "again" / "small")
    assert results(tmp_path / "again" / "small") == results(tmp_path / "whole" / "small")
