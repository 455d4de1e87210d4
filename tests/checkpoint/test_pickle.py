"""Pickled weights: refused unless asked for, then the same interface."""

import json
import os

import pytest
import torch

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError


class Hostile:
    def __reduce__(self):
        return (os.system, ("touch hacked",))


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    matrix = torch.randn(5, 3)
    matrices = {"w": matrix.bfloat16(), "transposed": matrix.T, "tied": matrix, "fp8": matrix.to(torch.float8_e4m3fn)}
    return {**matrices, "p": torch.nn.Parameter(torch.randn(2)), "scalar": torch.tensor(3)}


def pickled(folder, shards, **options):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if len(shards) == 1:
        torch.save(shards[0], folder / "pytorch_model.bin", **options)
        return folder
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"pytorch_model-{number:05d}-of-{len(shards):05d}.bin"
        torch.save(shard, folder / file, **options)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def split(state):
    names = list(state)
    return [{name: state[name] for name in part} for part in (names[:2], names[2:])]


@pytest.mark.parametrize("sharded", [False, True])
def test_refused_unless_asked(tmp_path, state, sharded):
    folder = pickled(tmp_path / "in", split(state) if sharded else [state])
    with pytest.raises(SurgeryError, match="--allow-pickle"):
        CheckpointReader.open(folder)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_same_interface(tmp_path, state, sharded, zipped):
    if not zipped:
        del state["fp8"]  # younger than that format
    shards = split(state) if sharded else [state]
    folder = pickled(tmp_path / "in", shards, _use_new_zipfile_serialization=zipped)
    reader = CheckpointReader.open(folder, allow_pickle=True)
    assert reader.names() == list(state)
    for name in reversed(list(state)):
        tensor = reader.tensor(name)
        assert (reader.info(name).dtype, reader.info(name).shape) == (state[name].dtype, tuple(state[name].shape))
        assert torch.equal(tensor.float(), state[name].detach().float()), name
        assert tensor.untyped_storage().nbytes() == reader.info(name).nbytes
    assert torch.equal(reader.rows("transposed", torch.tensor([2, 0])), state["transposed"][[2, 0]])
    assert reader.rows("tied", torch.tensor([], dtype=torch.int64)).shape == (0, 3)
    assert len(reader.fingerprint()) == 64
    assert reader.sidecars() == []


def test_safetensors_are_preferred(single):
    torch.save({"other": torch.ones(1)}, single / "pytorch_model.bin")
    assert "other" not in CheckpointReader.open(single, allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Hostile(), "GLOBAL posix.system"),
        ([torch.ones(1)], "holds a list"),
        ({"model": {"w": torch.ones(1)}}, "'model' is a dict, not a tensor"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "cannot be stored"),
        ({"w": torch.ones(2).to_sparse()}, "cannot be stored"),
    ],
)
def test_other_content_is_refused(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    folder = pickled(tmp_path / "in", [content])
    with pytest.raises(SurgeryError) as caught:
        CheckpointReader.open(folder, allow_pickle=True)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hacked").exists()


def test_damaged_file(tmp_path, state):
    folder = pickled(tmp_path / "in", [state])
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(SurgeryError, match=r"pytorch_model\.bin: torch\.load"):
        CheckpointReader.open(folder, allow_pickle=True)
