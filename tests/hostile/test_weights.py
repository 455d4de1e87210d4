"""Weight files that nobody meant well with: safetensors headers, indices, links, and pickles where they are allowed."""

import json

import pytest
import torch
from hostile import cases, damaged, mutated, taken_or_refused
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from surgery.checkpoint import CheckpointReader

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(1)}
FILE = save(TENSORS, {"format": "pt"})
DATA = 8 + int.from_bytes(FILE[:8], "little")
HEADER = json.loads(FILE[8:DATA])
INDEX = {"metadata": {"total_size": 40}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def read_all(folder, **allowed):
    """Every tensor; no more bytes than the files have."""
    reader = CheckpointReader.open(folder, **allowed)
    stored = sum(path.stat().st_size for path in folder.iterdir())
    assert sum(reader.info(name).nbytes for name in reader.names()) <= stored
    return {name: reader.tensor(name) for name in reader.names()}


def encoded(header) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + FILE[DATA:]


def claim(**entry):
    return {**HEADER, "a": {**HEADER["a"], **entry}}


@given(mutated(HEADER))
@cases(50)
@example(claim(shape=[2**30, 2**30]))
@example(claim(shape=[2**60, 0], data_offsets=[0, 0]))
@example(claim(shape=[10**30], data_offsets=[0, 4 * 10**30]))
@example(claim(shape=[True, 6]))
@example(claim(dtype=["F32"]))
@example(claim(dtype={}))
@example([HEADER])
def test_safetensors_headers(folder, header):
    (folder / "model.safetensors").write_bytes(encoded(header))
    taken_or_refused(lambda: read_all(folder))


@given(damaged(FILE, head=DATA) | damaged(FILE) | st.binary(max_size=64))
@cases(50)
@example((2**60).to_bytes(8, "little") + FILE[8:])
@example((99_000_000).to_bytes(8, "little") + FILE[8:])
@example(encoded(None)[:10] + b"[" * 100_000)
def test_safetensors_bytes(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    taken_or_refused(lambda: read_all(folder))


@pytest.fixture(scope="module")
def sharded(folder):
    other = folder.parent / "sharded"
    other.mkdir()
    (other / "config.json").write_text("{}")
    for name, file in INDEX["weight_map"].items():
        (other / file).write_bytes(save({name: TENSORS[name]}))
    return other


def shards(**files):
    return {"weight_map": INDEX["weight_map"] | files}


@given(mutated(INDEX))
@cases(50)
@example(shards(a="../../etc/passwd"))
@example(shards(a="/etc/passwd"))
@example(shards(a="..\\two.safetensors"))
@example(shards(a="one.safetensors\0"))
@example(shards(a="a" * 5000))
@example(shards(a="\ud800"))
@example(shards(a=["one.safetensors"]))
def test_indices(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    taken_or_refused(lambda: read_all(sharded))
