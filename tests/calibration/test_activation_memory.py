"""Activations past the limit lie in files: the bits are the same, and memory no longer grows with the text."""

import gc
import json

import pytest
import torch
from conversions import convert_checkpoint

from surgery.calibration.statistics import MomentAccumulator
from surgery.calibration.sweep import BoundaryStore, backward_sweep, forward_sweep
from surgery.common.errors import SurgeryError
from surgery.running.activations import ActivationMemory, give_back, in_file
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.registry import find_target

TEXT = {"calibration_tokens": 160, "calibration_length": 32, "held_out": 2, "batch_size": 3}
HALF = {"kv_ratio": 0.5}
SOME = "100KB"  # of a few of the tensors, and of no others
CASES = {
    "lowrank": ("lowrank", "llama", HALF | {"window": 8}, "1KB"),
    "lowrank, some of them": ("lowrank", "llama", HALF, SOME),
    "mla": ("mla", "qwen3", HALF, "1KB"),
    "gqa, float64": ("gqa", "qwen2", {"kv_heads": 1, "dtype": "float64"}, "1KB"),
    "crosslayer": ("crosslayer", "llama", HALF | {"method": "cascade", "group_size": 2}, "1KB"),
    "xkv": ("crosslayer", "llama", {"kv_ratio": 0.5, "method": "xkv", "group_size": 2}, "1KB"),
}
TRIED = [case if case == "lowrank" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def results(out):
    report = json.loads((out / "surgery_report.json").read_text())
    return (out / "model.safetensors").read_bytes(), [report[name] for name in ("layers", "ladder", "target", "splits")]


@pytest.mark.parametrize("case", TRIED)
def test_the_same_bits(checkpoints, tmp_path, monkeypatch, case):
    to, source, request, limit = CASES[case]
    spilled, count = [], ActivationMemory._count
    monkeypatch.setattr(
        ActivationMemory,
        "_count",
        lambda self, counter, size: spilled.append((counter, size)) or count(self, counter, size),
    )
    for folder, memory in (("all", None), ("limited", limit)):
        settings = find_target(to).settings({**TEXT, **request, "activation_memory": memory})
        convert_checkpoint(checkpoints(source), tmp_path / folder / "small", settings)
        assert bool(spilled) == (memory is not None)
    assert results(tmp_path / "limited" / "small") == results(tmp_path / "all" / "small")
    assert {counter for counter, _ in spilled} == ({"used", "spilled"} if limit is SOME else {"spilled"})
    gc.collect()
    assert sum(size for _, size in spilled) == 0


def live_bytes():
    """Return the bytes of all tensors in memory, each storage once."""
    storages = {
        result.untyped_storage().data_ptr(): result.untyped_storage().nbytes()
        for result in gc.get_objects()
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and not in_file(result)
    }
    return sum(storages.values())


def most_in_a_sweep(checkpoint, monkeypatch, sequences, limit):
    """Bytes of tensors while a layer's moments are made of all that was kept, at most."""
    records, result = [], MomentAccumulator.result

    def count(self):
        records.append(live_bytes())
        return result(self)

    monkeypatch.setattr(MomentAccumulator, "result", count)
    opened = Source.open(checkpoint, ConvertSettings())
    tokens = torch.randint(4096, (sequences, 64), generator=torch.Generator().manual_seed(0))
    before = live_bytes()
    with BoundaryStore(limit=limit) as store:
        final = forward_sweep(opened.stream, tokens, store, 2, lambda: None)
        for layer in backward_sweep(opened, store, final, 2):
            del layer
    monkeypatch.setattr(MomentAccumulator, "result", result)
    return max(records) - before - tokens.nbytes


def test_memory_of_a_sweep_does_not_grow_with_the_text(checkpoints, monkeypatch):
    all_of_it = [most_in_a_sweep(checkpoints("llama"), monkeypatch, count, None) for count in (8, 32)]
    limited = [most_in_a_sweep(checkpoints("llama"), monkeypatch, count, "1KB") for count in (8, 32)]
    entries = 24 * 64 * 4 * (2 * 32 + 2 * 32)  # of 24 sequences: 2 D + 2 n numbers a token
    assert all_of_it[1] - all_of_it[0] == pytest.approx(entries, rel=0.1)
    assert limited[1] - limited[0] <= 24 * 64 * 8  # weights of tokens
    assert limited[1] < all_of_it[0]


def test_a_limit_is_kept_and_freed(tmp_path):
    memory = ActivationMemory(100, tmp_path)
    one, two = memory.empty((10,), torch.float64), memory.empty((3, 2), torch.float64)
    assert (memory.used, memory.spilled, in_file(one), in_file(two)) == (80, 48, False, True)
    two.fill_(3.0)
    give_back(two[1], one)
    assert two.tolist() == [[3.0] * 2] * 3 and not list(tmp_path.iterdir())
    part = two[1:]
    del two
    assert memory.spilled == 48 and part.sum() == 12
    del one, part
    assert (memory.used, memory.spilled) == (0, 0)


def test_a_full_disk_and_a_limit_that_is_no_size_are_one_line(tmp_path):
    with pytest.raises(SurgeryError, match=r"no space left|File too large"):
        ActivationMemory(0, tmp_path).empty((2**50,), torch.float32)
    with pytest.raises(SurgeryError, match="'much' is not a size"):
        ConvertSettings(activation_memory="much")
