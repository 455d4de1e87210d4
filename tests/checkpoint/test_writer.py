"""Writer: it writes its input, readable by others, and to its final path only at a commit."""

import errno
import json
import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, verify_files
from surgery.checkpoint.stores import SafetensorsStore
from surgery.common.errors import SurgeryError

PLAN = {"a": TensorSpec(torch.float32, (2, 3)), "b": TensorSpec(torch.bfloat16, (4,))}
A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_all(out, tensors, **options) -> None:
    names = list(tensors)
    random.Random(1).shuffle(names)
    with CheckpointWriter(out, tensors, **options) as writer:
        for name in names:
            writer.write(name, tensors[name])
        writer.write_json("config.json", {"model_type": "llama"})
        writer.commit()


@pytest.mark.parametrize("max_shard_size", ["5GB", 100, 1], ids=["single", "sharded", "one each"])
def test_round_trip_of_every_dtype(tmp_path, every_dtype, max_shard_size):
    out = tmp_path / "out"
    write_all(out, every_dtype, max_shard_size=max_shard_size)
    reader = CheckpointReader.open(out)
    assert set(reader.names()) == set(every_dtype)
    for name, tensor in every_dtype.items():
        assert (reader.info(name).dtype, reader.info(name).shape) == (tensor.dtype, tuple(tensor.shape))
        assert raw(reader.tensor(name)) == raw(tensor), name
    verify_files(out, every_dtype)
    files = {path.name for path in out.iterdir()}
    if max_shard_size == "5GB":
        assert files == {"config.json", "model.safetensors"}
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in every_dtype.values())}
        shards = set(index["weight_map"].values())
        assert files == {"config.json", "model.safetensors.index.json"} | shards
        assert shards == {f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)}


@pytest.mark.parametrize("max_shard_size", ["5GB", 100], ids=["single", "sharded"])
def test_the_library_reads_it(tmp_path, every_dtype, max_shard_size):
    every_dtype.pop("float8_e8m0fnu.weight", None)  # the library has no torch type for it
    write_all(tmp_path / "out", every_dtype, max_shard_size=max_shard_size)
    records = set()
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 it is no dict
                assert raw(file.get_tensor(name)) == raw(every_dtype[name])
                records.add(name)
    assert records == set(every_dtype)


def test_tensors_are_aligned(tmp_path):
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2, dtype=torch.float64), "half": B}
    write_all(tmp_path / "out", tensors)
    store = SafetensorsStore(tmp_path / "out", ["model.safetensors"])
    for name, tensor in tensors.items():
        assert store._offsets[name] % tensor.dtype.itemsize == 0


def test_order_is_the_plans(tmp_path):
    tensors = {name: torch.full((5,), float(i)) for i, name in enumerate("zxyab")}
    write_all(tmp_path / "out", tensors, max_shard_size=40)
    assert CheckpointReader.open(tmp_path / "out").names() == list("zxyab")
    shards = [CheckpointReader.open(tmp_path / "out").info(name).file[6:11] for name in "zxyab"]
    assert shards == ["00001", "00001", "00002", "00002", "00003"]


def test_copy_holds_one_piece_at_a_time(tmp_path, single, monkeypatch):
    monkeypatch.setattr("surgery.checkpoint.reader.CHUNK_BYTES", 64)
    sizes = []
    read = SafetensorsStore.read

    def spy(self, name, ranges, out):
        sizes.append(out.nbytes)
        read(self, name, ranges, out)

    monkeypatch.setattr(SafetensorsStore, "read", spy)
    reader = CheckpointReader.open(single)
    plan = {name: reader.info(name) for name in reader.names()}
    with CheckpointWriter(tmp_path / "out", plan) as writer:
        for name in plan:
            writer.copy(name, reader)
        writer.write_json("config.json", {})
        writer.commit()
    assert max(sizes) == 64
    before, after = (load_file(folder / "model.safetensors") for folder in (single, tmp_path / "out"))
    assert all(raw(before[name]) == raw(after[name]) for name in plan)


def test_views_parameters_and_transposes(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"t": base.T, "slice": base[:, 1:3], "p": torch.nn.Parameter(base), "broadcast": base[0].expand(2, 4)}
    write_all(tmp_path / "out", tensors)
    reader = CheckpointReader.open(tmp_path / "out")
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name), tensor.detach())


def test_sidecar_files(tmp_path):
    (tmp_path / "real").write_bytes(b"\x00\xff")
    (tmp_path / "link").symlink_to("real")
    with CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("a", A)
        writer.write("b", B)
        writer.copy_file(tmp_path / "link", "sub/tokenizer.bin")
        writer.write_text("card.md", "first")
        writer.write_text("card.md", "schön\n")
        writer.write_json("config.json", {"x": 1})
        writer.finish()
        writer.write_json("surgery_report.json", {"verified": True})
        writer.commit()
    out = tmp_path / "out"
    assert not (out / "sub" / "tokenizer.bin").is_symlink()
    assert (out / "sub" / "tokenizer.bin").read_bytes() == b"\x00\xff"
    assert (out / "card.md").read_text(encoding="utf-8") == "schön\n"
    assert json.loads((out / "surgery_report.json").read_text()) == {"verified": True}
    assert {path.name for path in out.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", ".", "model.safetensors", ".surgery-partial"])
def test_sidecar_names(tmp_path, name):
    with CheckpointWriter(tmp_path / "out", PLAN) as writer, pytest.raises(SurgeryError, match="choose another name"):
        writer.write_text(name, "x")
    with CheckpointWriter(tmp_path / "out", PLAN) as writer, pytest.raises(SurgeryError, match="gone: No such file"):
        writer.copy_file(tmp_path / "gone", "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("c", A, "c is not in the plan"),
        ("a", A.T, r"a is planned as float32 \[2, 3\] but is float32 \[3, 2\]"),
        ("a", A.double(), "but is float64"),
        ("a", torch.full((2, 3), torch.nan), "a contains NaN or infinity"),
        ("b", B / 0, "b contains NaN or infinity"),
    ],
)
def test_wrong_tensors_leave_the_disk_as_it_was(tmp_path, disk, name, tensor, words):
    before = disk()
    with pytest.raises(SurgeryError, match=words), CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write(name, tensor)
    assert disk() == before


def test_nan_in_a_copy(tmp_path, single):
    reader = CheckpointReader.open(single)
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff\xff\xff")
    name = next(n for n in reader.names() if torch.isnan(reader.tensor(n)).any())
    with (
        pytest.raises(SurgeryError, match=f"{name} contains NaN"),
        CheckpointWriter(tmp_path / "out", {name: reader.info(name)}) as writer,
    ):
        writer.copy(name, reader)


def test_copy_checks_the_plan(tmp_path, single):
    reader = CheckpointReader.open(single)
    plan = {"embed.weight": TensorSpec(torch.float32, (6, 40)), "x": TensorSpec(torch.float32, (1,))}
    with CheckpointWriter(tmp_path / "out", plan) as writer:
        with pytest.raises(SurgeryError, match=r"planned as float32 \[6, 40\] but is float32 \[40, 6\]"):
            writer.copy("embed.weight", reader)
        with pytest.raises(SurgeryError, match="no tensor x"):
            writer.copy("x", reader)


def test_second_write_and_missing_write(tmp_path, disk):
    before = disk()
    with CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("a", A)
        with pytest.raises(SurgeryError, match="a was written before"):
            writer.write("a", A)
        for end in (writer.finish, writer.commit):
            with pytest.raises(SurgeryError, match="1 planned tensors were not written, first b"):
                end()
    assert disk() == before


def test_only_inside_the_context(tmp_path):
    writer = CheckpointWriter(tmp_path / "out", PLAN)
    with pytest.raises(SurgeryError, match="not open"):
        writer.write("a", A)
    with writer:
        writer.write("a", A)
        writer.write("b", B)
        writer.commit()
        with pytest.raises(SurgeryError, match="not open"):
            writer.write_text("late", "x")
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({}, "the plan has no tensors"),
        ({"": PLAN["a"]}, "not a valid tensor name"),
        ({"__metadata__": PLAN["a"]}, "not a valid tensor name"),
        ({"z": TensorSpec(torch.complex64, (1,))}, "no such dtype"),
    ],
)
def test_impossible_plans(tmp_path, disk, plan, words):
    before = disk()
    with pytest.raises(SurgeryError, match=words):
        CheckpointWriter(tmp_path / "out", plan)
    assert disk() == before


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    write_all(tmp_path / "out", {"a": A, "b": B})
    assert torch.equal(CheckpointReader.open(tmp_path / "out").tensor("a"), A)


# Whatever interrupts the writer, the disk is afterwards as it was before.


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "no space left on the disk"), (errno.EIO, "Input/output error")]
)
def test_disk_fails_while_writing(tmp_path, disk, monkeypatch, code, words):
    before = disk()
    write, calls = os.write, []

    def failing(handle, data):
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(code, os.strerror(code))
        return write(handle, data[: max(1, len(data) // 2)])  # the system may write less than asked

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(SurgeryError, match=words) as caught, CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("a", A)
    assert "\n" not in str(caught.value)
    assert disk() == before


def test_interrupts(tmp_path, disk):
    before = disk()
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("a", A)
        writer.write_text("sub/x", "x")
        assert writer.partial.is_dir()
        assert not writer.out.exists()
        raise KeyboardInterrupt
    assert disk() == before


def test_interrupt_while_files_are_made(tmp_path, disk, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = disk()
    monkeypatch.setattr("surgery.checkpoint.writer.encode_header", interrupted)
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "out", PLAN):
        pass
    assert disk() == before


def test_leaving_without_commit(tmp_path, disk):
    before = disk()
    with CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("a", A)
        writer.write("b", B)
        writer.finish()
    assert disk() == before
