"""Every fault of a checkpoint's files is found by `open`, and told in one line."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError

INDEX = "model.safetensors.index.json"


def refused(source, words: str, **options) -> None:
    with pytest.raises(SurgeryError) as caught:
        CheckpointReader.open(source, **options)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message


def with_header(folder, header, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_source(tmp_path, single):
    refused(tmp_path / "nowhere", "no such folder")
    refused("./org/name", "no such folder")
    refused(single / "config.json", "is a file; pass the checkpoint folder")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not valid JSON"), ("[1]", "a JSON list, not an object"), (b"\xff\xfe\x00", "not valid JSON")],
)
def test_config(single, content, words):
    (single / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(single, words)


def test_no_config_and_no_weights(single):
    with_header(single, {"__metadata__": {"format": "pt"}})
    refused(single, "contain no tensors")
    (single / "model.safetensors").unlink()
    refused(single, "no weights")
    (single / "config.json").unlink()
    refused(single, "no config.json")


@pytest.mark.parametrize("entries", [0, 5, 30, -1])
def test_a_file_of_another_length(single, entries):
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:entries])
    refused(single, "model.safetensors: truncated")
    path.write_bytes(content + b"x")
    refused(single, "too long")


def test_shortened_after_opening(single):
    reader = CheckpointReader.open(single)
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SurgeryError, match="was truncated"):
        for name in reader.names():
            reader.tensor(name)


def test_not_safetensors(single):
    path = single / "model.safetensors"
    path.write_bytes(b"PK\x03\x04" * 100)
    refused(single, "not a safetensors file")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(single, "git lfs pull")


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"\xff\xfe not json", b"", "damaged safetensors header"),
        (b"[1, 2]", b"", "damaged safetensors header"),
        (b"[" * 100_000, b"", "damaged safetensors header"),
        ({"w": 3}, b"", "damaged safetensors header"),
        ({"w": {"dtype": "F32"}}, b"", "damaged safetensors header"),
        ({"w": entry(dtype=["F32"])}, b"1234", "damaged safetensors header"),
        ({"w": entry(dtype="F4")}, b"1234", "dtype F4, which is not supported"),
        ({"w": entry(shape=[-1])}, b"1234", "has an invalid shape [-1]"),
        ({"w": entry(shape=[True])}, b"1234", "has an invalid shape [True]"),
        ({"w": entry(shape=["1"])}, b"1234", "has an invalid shape ['1']"),
        ({"w": entry(shape=[2])}, b"1234", "needs 8 bytes but has 4"),
        ({"w": entry(offsets=[4, 8])}, b"12345678", "overlap or leave a gap"),
        ({"w": entry(), "v": entry()}, b"1234", "overlap or leave a gap"),
        ({"w": entry(), "v": entry(offsets=[8, 12])}, b"123456789012", "overlap or leave a gap"),
        (b'{"w": %b, "w": %b}' % ((json.dumps(entry()).encode(),) * 2), b"1234", "duplicate key 'w'"),
    ],
)
def test_damaged_header(single, header, data, words):
    with_header(single, header, data)
    refused(single, words)


def test_shard_missing(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    refused(sharded, "1 of 2 weight files missing, first model-00001-of-00002.safetensors")


def edit_index(folder, **weight_map) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= weight_map
    (folder / INDEX).write_text(json.dumps(index))


def test_index_that_does_not_fit_its_shards(sharded):
    edit_index(sharded, a="model-00002-of-00002.safetensors", b="model-00001-of-00002.safetensors")
    refused(sharded, "a is in model-00001-of-00002.safetensors, but the index says")
    edit_index(sharded, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    edit_index(sharded, c="model-00001-of-00002.safetensors")
    refused(sharded, "the index lists c, which no shard contains")


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../x.safetensors", "sub/x.safetensors", "..", ".", "", r"..\x", r"C:x", 3, None]
)
def test_index_leaves_the_folder(sharded, file):
    edit_index(sharded, a=file)
    refused(sharded, "which is not a plain file name")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_damaged_index(sharded, content):
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


def test_tensors_that_are_there_twice(sharded):
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, sharded / "model-00002-of-00002.safetensors")
    refused(sharded, "a is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors")
    save_file({"a": torch.zeros(2)}, sharded / "model.safetensors")
    refused(sharded, "remove the stale one")


def test_an_index_may_be_of_one_file_and_leave_tensors_out(single, sharded):
    reader = CheckpointReader.open(single)
    weight_map = dict.fromkeys(reader.names(), "model.safetensors")
    (single / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert CheckpointReader.open(single).names() == reader.names()
    save_file({"b": torch.zeros(2), "extra": torch.ones(2)}, sharded / "model-00002-of-00002.safetensors")
    assert CheckpointReader.open(sharded).names() == ["a", "b", "extra"]
