"""Tokenizers and other files next to weights that nobody meant well with."""

import json
import os
import shutil

import pytest
from hostile import cases, damaged, mutated, taken_or_refused
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import DEMO, make_checkpoint

from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.checkpoint.carried_files import CarriedFiles
from surgery.checkpoint.carry_over import copy_sidecars
from surgery.checkpoint.tensors import TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.machine_faults import fault_message, is_panic
from surgery.evaluation.models import Checkpoint
from surgery.running.loading import load_tokenizer, loading

TOKENIZER = json.loads((DEMO / "tokenizer.json").read_text())
TOKENIZER["model"]["merges"] = []
TOKENIZER["model"]["vocab"] = dict(list(TOKENIZER["model"]["vocab"].items())[:300])
CONFIG = json.loads((DEMO / "tokenizer_config.json").read_text())
CODE = "import pathlib; pathlib.Path({ran!r}).touch()\n"
REMOTE = {
    "config.json": {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}, "tokenizer_class": "Evil"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hostile") / "llama", "llama")


@given(mutated(TOKENIZER), mutated(CONFIG))
@example(TOKENIZER, CONFIG | {"model_max_length": []})
@cases(10)
def test_tokenizers(folder, tokenizer, config):
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    taken_or_refused(lambda: load_tokenizer(folder)("def f(x): return x"))


@given(st.data())
@cases(7)
def test_bytes(folder, data):
    whole = json.dumps(TOKENIZER).encode()
    (folder / "tokenizer.json").write_bytes(data.draw(damaged(whole) | st.binary(max_size=40)))
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    taken_or_refused(lambda: load_tokenizer(folder)("def f(x): return x"))


@given(mutated(TOKENIZER), mutated(CONFIG))
@example(TOKENIZER, CONFIG | {"model_max_length": []})
@cases(2, limit=1000)
def test_copies_stay_in_the_output(folder, tmp_path_factory, tokenizer, config):
    """Whatever a tokenizer says, it is copied unchanged, and nothing is written elsewhere."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reader, out = CheckpointReader.open(folder), folder.parent / "out"
    before = sorted(os.listdir(folder.parent))

    def copy():
        import torch

        with CheckpointWriter(out, {"a": TensorSpec(torch.float32, (1,))}) as writer:
            writer.write_json("config.json", reader.config)
            copy_sidecars(reader, CarriedFiles.of(reader), (), writer)
            return (writer.partial / "tokenizer.json").read_bytes()

    copied = taken_or_refused(copy)
    assert copied is None or copied == (folder / "tokenizer.json").read_bytes()
    assert sorted(os.listdir(folder.parent)) == before


@pytest.mark.parametrize("entries", [(), ("tokenizer.json",)])
def test_no_code_runs_unless_it_is_trusted(entries, tmp_path):
    folder, ran = make_checkpoint(tmp_path / "llama", "llama"), tmp_path / "ran"
    (folder / "evil.py").write_text(CODE.format(ran=str(ran)))
    for name, changes in REMOTE.items():
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**document, **changes}))
    if not entries:
        (folder / "tokenizer.json").unlink()
    taken_or_refused(lambda: load_tokenizer(folder))
    taken_or_refused(lambda: Checkpoint.open(str(folder)).tokenizer())
    taken_or_refused(lambda: Checkpoint.open(str(folder)).load("cpu"))
    assert not ran.exists()


def test_patterns_that_backtrack(folder):
    """Rust gives up by a panic, which is no Exception of Python."""
    pattern = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({**TOKENIZER, "pre_tokenizer": pattern}))
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(BaseException) as panic:
        tokenizer("x" * 40)
    assert is_panic(panic.value) and "tokenizer" in fault_message(panic.value)
    with pytest.raises(SurgeryError, match="transformers cannot load it"), loading("x"):
        tokenizer("x" * 40)
