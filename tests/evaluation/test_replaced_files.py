"""Replaced files: a checkpoint loads as it was hashed; files that were touched in between are refused, even if
restored."""

import os
import shutil

import pytest
from tiny_models import make_checkpoint

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.evaluation.models import Checkpoint
from surgery.running import models
from surgery.running.unfused import open_model

CHANGED = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
ADDED = ("added_tokens.json", "chat_template.jinja", "modeling_x.py", "pytorch_model.bin")
ADDED += ("model.safetensors.index.json",)


@pytest.fixture
def folder(checkpoints, tmp_path):
    return shutil.copytree(checkpoints("llama"), tmp_path / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("other") / "model", "llama")


def replace(path, other):
    """Another file in the place of one, with its time and size where that can be."""
    before = path.stat()
    shutil.copyfile(other, path.with_name("new"))
    os.utime(path.with_name("new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    path.with_name("new").replace(path)


@pytest.mark.parametrize("name", CHANGED + ADDED)
def test_replaced_and_added_files_are_refused(folder, other, name):
    checkpoint = Checkpoint.open(str(folder))
    if name in CHANGED:
        replace(folder / name, other / name)
    else:
        (folder / name).write_text('{"weight_map": {"a": "model.safetensors"}}')
    for use in (lambda: checkpoint.load("cpu"), checkpoint.tokenizer):
        with pytest.raises(SurgeryError, match=rf"{name}: was changed while it was read; start again"):
            use()


def test_files_that_are_put_back_are_refused(folder, other, monkeypatch):
    checkpoint, load = Checkpoint.open(str(folder)), models.causal_model_unchecked
    shutil.copy2(folder / "model.safetensors", folder / "kept")

    def swapped(*arguments, **options):
        shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
        model = load(*arguments, **options)
        shutil.copy2(folder / "kept", folder / "model.safetensors")
        return model

    monkeypatch.setattr(models, "causal_model_unchecked", swapped)
    with pytest.raises(SurgeryError, match=r"model.safetensors: was changed"):
        checkpoint.load("cpu")


def test_files_replaced_before_they_are_hashed_are_refused(folder, other):
    """The config was parsed already, and would be that of other weights."""
    reader = CheckpointReader.open(folder)
    replace(folder / "config.json", other / "config.json")
    reader.fingerprint()
    with pytest.raises(SurgeryError, match=r"config.json: was changed"):
        models.causal_model(reader)


@pytest.mark.parametrize("kind", ["phi3", "gpt2"])
def test_views_of_other_names_are_held_to_the_same(checkpoints, tmp_path, kind):
    folder = shutil.copytree(checkpoints(kind), tmp_path / "model")
    reader = open_model(folder)
    reader.check_untouched()
    os.utime(folder / "model.safetensors")
    with pytest.raises(SurgeryError, match="was changed"):
        models.causal_model(reader)


def test_what_loading_does_not_read_may_change(folder):
    checkpoint = Checkpoint.open(str(folder))
    (folder / "README.md").write_text("x")
    (folder / "checkpoint-100").mkdir()
    (folder / "checkpoint-100" / "optimizer.pt").write_text("x")
    (folder / "train.log").write_text("x")
    assert checkpoint.load("cpu") is not None and checkpoint.tokenizer() is not None
