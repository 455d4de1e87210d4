"""GGUF files that nobody meant well with: opened and read, or refused in one line."""

import struct

import pytest
import torch
from gguf_files import make_model, write_gguf
from hostile import cases, damaged, taken_or_refused
from hypothesis import given
from hypothesis import strategies as st

from surgery.checkpoint.gguf_header import read_gguf_header
from surgery.checkpoint.gguf_model import describe_model
from surgery.checkpoint.gguf_store import GgufStore
from surgery.common.errors import SurgeryError

INT32, FLOAT32, STRING, UINT64, FLOAT64 = 5, 6, 8, 10, 12
METADATA = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (UINT64, 1),
    "llama.context_length": (UINT64, 64),
    "llama.embedding_length": (UINT64, 8),
    "llama.feed_forward_length": (UINT64, 8),
    "llama.attention.head_count": (UINT64, 2),
    "llama.attention.head_count_kv": (UINT64, 1),
    "llama.attention.key_length": (UINT64, 4),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
    "llama.rope.freq_base": (FLOAT32, 1e4),
    "llama.rope.scaling.type": (STRING, "none"),
    "llama.expert_count": (UINT64, 0),
    "split.count": (UINT64, 1),
    "general.alignment": (UINT64, 32),
    "tokenizer.ggml.bos_token_id": (UINT64, 1),
}
TENSORS = {"token_embd.weight": (8, 16), "output_norm.weight": (8,), "rope_freqs.weight": (2,)}
TENSORS |= {f"blk.0.{name}_norm.weight": (8,) for name in ("attn", "ffn")}
TENSORS |= {f"blk.0.attn_{name}.weight": (8, rows) for name, rows in {"q": 8, "k": 4, "v": 4, "output": 8}.items()}
TENSORS |= {f"blk.0.ffn_{name}.weight": (8, 8) for name in ("gate", "up", "down")}


def text(value: str) -> bytes:
    message = value.encode("utf-8", "replace")
    return struct.pack("<Q", len(message)) + message


def packed(kind: int, value) -> bytes:
    if kind == STRING:
        return text(value)
    code = {INT32: "i", FLOAT32: "f", UINT64: "Q", FLOAT64: "d"}[kind]
    return struct.pack(f"<{code}", value)


def gguf_bytes(metadata, tensors, room: int = 4096) -> bytes:
    """A file of those metadata, (kind, value) by key, and tensors, (type, dimensions, offset) by name."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        head += text(key) + struct.pack("<I", kind) + packed(kind, value)
    for name, (kind, shape, offset) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return head + bytes(room)


def plain(tensors):
    return {name: (0, shape, 0) for name, shape in tensors.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "file.gguf"


def read_all(file):
    """Read as `CheckpointReader` does, without the temporary folder that it makes for each file."""
    model = describe_model(file, read_gguf_header(file))
    store = GgufStore(file, model.tensors, model.dtype)
    for name, info in store.infos.items():
        assert info.nbytes < 2**20
        store.read(name, [(0, info.nbytes)], torch.empty(info.nbytes, dtype=torch.uint8))
    return model


def test_the_file_without_changes_is_read(file):
    tensors = {name: shape for name, shape in TENSORS.items() if name != "rope_freqs.weight"}
    file.write_bytes(gguf_bytes(METADATA, plain(tensors)))
    assert read_all(file).config["num_hidden_layers"] == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole model's file, and where its header ends."""
    path = write_gguf(tmp_path_factory.mktemp("hostile") / "tiny.gguf", make_model("llama"), "Q4_0")
    return path.read_bytes(), min(tensor.offset for tensor in read_gguf_header(path).tensors.values())


@given(st.data())
@cases(15)
def test_bytes(file, whole, data):
    content, head = whole
    file.write_bytes(data.draw(damaged(content, head) | st.binary(max_size=64).map(lambda tail: b"GGUF" + tail)))
    taken_or_refused(lambda: describe_model(file, read_gguf_header(file)))


FOUND = {
    "a head of 2^60 numbers": {"llama.attention.key_length": (UINT64, 2**60)},
    "2^60 heads": {"llama.attention.head_count": (UINT64, 2**60)},
    "2^60 layers": {"llama.block_count": (UINT64, 2**60)},
    "parts as text": {"split.count": (STRING, "many")},
    "an epsilon of infinity": {"llama.attention.layer_norm_rms_epsilon": (FLOAT64, 1e300)},
    "a base of nothing": {"llama.rope.freq_base": (FLOAT32, 0.0)},
    "an alignment below zero": {"general.alignment": (INT32, -32)},
    "an alignment of nothing": {"general.alignment": (INT32, 0)},
}


@pytest.mark.parametrize("result", FOUND)
def test_found(result, file):
    file.write_bytes(gguf_bytes(METADATA | FOUND[result], plain(TENSORS)))
    with pytest.raises(SurgeryError):
        read_all(file)
