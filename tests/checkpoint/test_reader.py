"""The reader gives what other libraries stored, and nothing more is read than asked for."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from surgery.checkpoint import CheckpointReader, TensorInfo
from surgery.checkpoint.stores import SafetensorsStore
from surgery.common.errors import SurgeryError

# The safetensors library has no torch type for it.
UNKNOWN_TO_LIBRARY = "float8_e8m0fnu.weight"


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit-identical, of one dtype and shape."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def test_single_file_every_dtype(tmp_path, every_dtype):
    every_dtype.pop(UNKNOWN_TO_LIBRARY, None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(every_dtype, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    assert reader.path == tmp_path
    assert reader.config == {"model_type": "llama"}
    assert set(reader.names()) == set(every_dtype)
    for name, tensor in every_dtype.items():
        assert name in reader
        assert reader.info(name) == TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.nbytes, "model.safetensors")
        assert same(reader.tensor(name), tensor), name
        pieces = [piece.clone() for piece in reader.chunks(name)]
        assert same(torch.cat(pieces or [tensor.reshape(-1)]), tensor.reshape(-1))
        if tensor.shape == (3, 5):
            rows = tensor.view(torch.uint8).reshape(3, -1)[[2, 0, 2]].view(tensor.dtype)
            assert same(reader.rows(name, torch.tensor([2, 0, 2])), rows), name


def test_names_keep_the_files_order(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    header = {"__metadata__": {"format": "pt"}}
    header |= {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate("zay")}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes([1, 2, 3]))
    reader = CheckpointReader.open(str(tmp_path))
    assert reader.names() == ["z", "a", "y"]
    assert reader.tensor("a").tolist() == [2]


def test_tensors_of_a_module(single):
    reader = CheckpointReader.open(single)
    for prefix in ("layers.1", "layers.1."):
        assert list(reader.tensors(prefix)) == ["layers.1.w"]
    assert set(reader.tensors("")) == set(reader.names())
    assert reader.tensors("layers.2") == {}


def test_what_is_not_there_is_refused(single):
    reader = CheckpointReader.open(single)
    assert "nope" not in reader
    for call in (reader.info, reader.tensor, lambda name: next(reader.chunks(name))):
        with pytest.raises(SurgeryError, match="no tensor nope"):
            call("nope")
    for bad in (40, -1):
        with pytest.raises(SurgeryError, match=f"embed.weight has no row {bad}, only 40 rows"):
            reader.rows("embed.weight", torch.tensor([0, bad]))
    with pytest.raises(SurgeryError, match=r"layers.10.w is float32 \[7\], not a matrix"):
        reader.rows("layers.10.w", torch.tensor([0]))


@pytest.mark.parametrize(
    "index", [[3, 1, 1, 39, 0], [[2, 1], [0, 7]], [4, 5, 6], [], 5], ids=["mixed", "2-D", "run", "empty", "scalar"]
)
def test_rows(single, index):
    reader = CheckpointReader.open(single)
    index = torch.tensor(index, dtype=torch.int64)
    assert same(reader.rows("embed.weight", index), reader.tensor("embed.weight")[index])


def test_chunks_bound_the_pieces(single, monkeypatch):
    monkeypatch.setattr("surgery.checkpoint.reader.CHUNK_BYTES", 64)
    reader = CheckpointReader.open(single)
    pieces = [piece.clone() for piece in reader.chunks("embed.weight")]
    assert max(piece.nbytes for piece in pieces) == 64
    assert same(torch.cat(pieces), reader.tensor("embed.weight").reshape(-1))


def test_nothing_is_read_but_what_is_asked_for(single, monkeypatch):
    requests = []
    read = SafetensorsStore.read
    monkeypatch.setattr(SafetensorsStore, "read", lambda self, *args: requests.append(args[:2]) or read(self, *args))
    reader = CheckpointReader.open(single)
    assert requests == []
    tensor = reader.tensor("layers.1.w")
    assert requests == [("layers.1.w", [(0, 96)])]
    assert tensor.untyped_storage().nbytes() == 96
    reader.rows("embed.weight", torch.tensor([9, 3, 8, 3]))
    assert requests[1:] == [("embed.weight", [(3 * 24, 4 * 24), (8 * 24, 10 * 24)])]


def test_sidecars(single):
    expected = ["README.md", "chat_template.jinja", "code.py", "surgery_report.json", "tokenizer.json"]
    strays = ["consolidated.safetensors", "notes.txt", "pytorch_model.bin", "sub/config.json", "trainer_state.json"]
    ignored = [*strays, "sub/generation_config.json"]
    ignored += [".git/config", ".hidden", ".cache/x", "sub/.hidden", "__pycache__/m.pyc"]
    ignored += ["sub/weights.pth", "x.gguf", "sub/model.safetensors.index.json"]
    for name in expected + ignored:
        (single / name).parent.mkdir(exist_ok=True)
        (single / name).write_text("x")
    reader = CheckpointReader.open(single)
    assert sorted(str(path.relative_to(reader.path)) for path in reader.sidecars()) == expected
    assert {*strays} <= {*reader.files.strays} and not {*reader.files.strays} & {*expected}
    (single / "tokenizer.json").unlink()
    (single / "tokenizer.json").symlink_to("../gone")
    with pytest.raises(SurgeryError, match="broken link"):
        CheckpointReader.open(single)


class TestFingerprint:
    def test_same_content_in_other_shards(self, tmp_path, single):
        tensors = load_file(single / "model.safetensors")
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_bytes((single / "config.json").read_bytes())
        names = sorted(tensors)
        weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(reversed(names))}
        for name, file in weight_map.items():
            save_file({name: tensors[name]}, other / file)
        (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        first, second = CheckpointReader.open(single), CheckpointReader.open(other)
        assert first.names() != second.names()
        assert first.fingerprint() == second.fingerprint()
        assert len(first.fingerprint()) == 64

    def test_any_change_shows(self, single):
        original = CheckpointReader.open(single).fingerprint()
        tensors = load_file(single / "model.safetensors")
        changes = [
            tensors | {"layers.1.w": tensors["layers.1.w"] + 1},
            tensors | {"layers.1.w": tensors["layers.1.w"].reshape(6, 4)},
            tensors | {"layers.1.w": tensors["layers.1.w"].view(torch.int32)},
            {name + "x": tensor for name, tensor in tensors.items()},
        ]
        records = {original}
        for changed in changes:
            save_file(changed, single / "model.safetensors")
            records.add(CheckpointReader.open(single).fingerprint())
        save_file(tensors, single / "model.safetensors")
        (single / "config.json").write_text('{"model_type": "other"}')
        records.add(CheckpointReader.open(single).fingerprint())
        assert len(records) == len(changes) + 2

    def test_progress_counts_every_byte(self, single):
        reader, counts = CheckpointReader.open(single), []
        reader.fingerprint(counts.append)
        assert sum(counts) == sum(reader.info(name).nbytes for name in reader.names())

    def test_in_chunks(self, single, monkeypatch):
        whole = CheckpointReader.open(single).fingerprint()
        monkeypatch.setattr("surgery.checkpoint.reader.CHUNK_BYTES", 32)
        assert CheckpointReader.open(single).fingerprint() == whole


class TestHubLayout:
    def test_download(self, monkeypatch, single):
        calls = []
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda repo, **options: calls.append((repo, options)) or str(single)
        )
        reader = CheckpointReader.open("some-org/Some.Model-1")
        assert reader.path == single
        (repo, options) = calls.pop()
        assert repo == "some-org/Some.Model-1"
        assert "*.safetensors" in options["allow_patterns"]
        assert not any(".bin" in pattern for pattern in options["allow_patterns"])

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (LocalEntryNotFoundError("long\nstory"), "not reachable and the model is not in the cache"),
            (ConnectionError("first\nsecond"), "no such folder.*ConnectionError: first$"),
            (OSError(), "OSError"),
            # The constructors of these want a whole HTTP response.
            (GatedRepoError.__new__(GatedRepoError), "gated"),
            (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "does not exist or is private"),
            (RevisionNotFoundError.__new__(RevisionNotFoundError), "RevisionNotFoundError"),
        ],
    )
    def test_errors_of_the_hub_are_one_line(self, monkeypatch, error, words):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(SurgeryError, match=f"^org/name: .*{words}") as caught:
            CheckpointReader.open("org/name")
        assert "\n" not in str(caught.value)

    def test_a_folder_comes_before_the_hub(self, monkeypatch, tmp_path, single):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "org").mkdir()
        single.rename(tmp_path / "org" / "name")
        assert CheckpointReader.open("org/name").path == Path("org/name")
