"""Tokenizers and other files next to weights that nobody meant well with."""

import json
import shutil

import pytest
from hostile import cases, mutated, taken_or_refused
from hypothesis import example, given
from tiny_models import DEMO, make_checkpoint

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
