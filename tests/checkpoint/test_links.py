"""Links of a checkpoint's folder are followed, as transformers does."""

import os

import pytest
import torch
from command_line import run_main
from safetensors.torch import save_file
from tiny_models import make_checkpoint

from surgery.checkpoint import CheckpointReader

BLOB, COMMIT = "0123456789abcdef" * 4, "0123456789" * 4


@pytest.fixture
def target(tmp_path):
    """Makes a folder whose weights are a link to a file at a path."""

    def make(blob):
        folder, real = tmp_path / "local", tmp_path / blob
        folder.mkdir()
        real.parent.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        save_file({"a": torch.ones(2)}, real)
        (folder / "model.safetensors").symlink_to(real)
        return folder

    return make


@pytest.mark.parametrize("blob", [BLOB, COMMIT])
def test_local_folders_of_the_hub_are_followed(target, blob):
    """Links that `--local-dir` made, huggingface/huggingface_hub#2284."""
    reader = CheckpointReader.open(target(f"cache/models--org--name/blobs/{blob}"))
    assert torch.equal(reader.tensor("a"), torch.ones(2))


def test_links_to_links_of_a_snapshot_are_followed(tmp_path, target):
    folder = target(f"models--o--n/blobs/{BLOB}")
    snapshot = tmp_path / "models--o--n" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{BLOB}")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(snapshot / "model.safetensors")
    assert CheckpointReader.open(folder).names() == ["a"]


def test_a_conversion_follows_links_and_copies_their_content(tmp_path, monkeypatch, capsys):
    source, real = make_checkpoint(tmp_path / "source", "llama"), tmp_path / "real"
    real.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (source / name).rename(real / name)
        (source / name).symlink_to(os.path.relpath(real / name, source))
    arguments = ["convert", source, "--to", "gqa", "--kv-heads", "1", "--calibration", "none"]
    arguments += ["--out", tmp_path / "out"]
    code, _, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (real / "tokenizer.json").read_bytes()
