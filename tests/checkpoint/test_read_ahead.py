"""Prefetching: the system is asked for what is needed next while something else is computed, and for nothing else."""

import os
from pathlib import Path

import pytest
from gguf_files import make_model, write_gguf
from quantized_checkpoints import make_quantized

from surgery.checkpoint import CheckpointReader, gguf_store, stores
from surgery.checkpoint.disk import read_exactly
from surgery.checkpoint.read_ahead import PIECE
from surgery.running import layer_stream
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.mla.settings import ConvertSettings


@pytest.fixture
def requests(monkeypatch):
    """Offsets of files that the system was asked to read."""
    offsets = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, size, advice: offsets.append(offset))
    return offsets


def starts(reader, layer):
    """Return the starts of all tensors of a layer."""
    prefix = f"model.layers.{layer}."
    return {offset for name in reader.names() if name.startswith(prefix) for _, offset, _ in file_ranges(reader, name)}


def file_ranges(reader, name):
    return reader._store.file_ranges(name)


def test_a_sweep_asks_for_the_next_layer_in_its_direction(checkpoints, requests, monkeypatch):
    monkeypatch.setattr(layer_stream, "SMALL", 0)
    stream = Source.open(checkpoints("llama"), ConvertSettings()).stream
    for layer, following in ((0, 1), (1, None), (0, None), (1, None), (0, None), (0, 1)):
        requests.clear()
        with stream.layer(layer):
            stream.reader._ahead.wait()
        expected = set() if following is None else starts(stream.reader, following)
        assert set(requests) >= expected and bool(requests) == bool(expected), (layer, following)


def test_a_small_model_stays_loaded_and_asks_for_nothing(checkpoints, requests):
    stream = Source.open(checkpoints("llama"), ConvertSettings()).stream
    with stream.layer(0):
        stream.reader._ahead.wait()
    assert not requests


@pytest.mark.parametrize("kind", ["llama", "phi3", "gguf", "fp8"])
def test_file_ranges_are_those_that_are_read(kind, checkpoints, tmp_path, monkeypatch):
    if kind == "gguf":
        source = write_gguf(tmp_path / "tiny.gguf", make_model("llama"), "Q8_0")
    else:
        source = make_quantized(tmp_path / "small", "llama", "fp8") if kind == "fp8" else checkpoints(kind)
    reader, at = open_model(source), []

    def watched(file, view):
        at.append(file.tell())
        return read_exactly(file, view)

    for module in (stores, gguf_store):
        monkeypatch.setattr(module, "read_exactly", watched)
    for name in reader.names():
        at.clear()
        reader.tensor(name)
        result = file_ranges(reader, name)
        assert at and all(any(offset <= each < offset + size for _, offset, size in result) for each in at), name
        assert all(offset + size <= file.stat().st_size for file, offset, size in result)


def test_all_bytes_are_asked_for_in_pieces_and_what_is_gone_is_no_error(single, requests):
    reader = CheckpointReader.open(single)
    reader.read_ahead("")
    reader._ahead.wait()
    for name in reader.names():
        [(_, offset, size)] = file_ranges(reader, name)
        assert set(range(offset, offset + size, PIECE)) <= set(requests)
    for path in Path(single).glob("*.safetensors"):
        path.unlink()
    reader.read_ahead("")
    reader._ahead.wait()
