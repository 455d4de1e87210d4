"""Converted checkpoints cut text as their sources do, whatever class transformers takes for their model type."""

import json
import shutil

import pytest
from conversions import convert_checkpoint
from processes import Fork
from tiny_models import HELD_OUT
from transformers import AutoTokenizer

from surgery.checkpoint import CheckpointWriter, tokenizer_class
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings

QUICK = {"calibration": "none", "held_out": 1, "kv_ratio": 0.5}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("settings", [ConvertSettings(**QUICK), LowRankSettings(**QUICK)], ids=["stock", "own"])
def test_text_is_cut_alike(checkpoints, conversions, name, settings):
    source, out = checkpoints(name), conversions(name, settings).path
    text = HELD_OUT.read_text(encoding="utf-8")[:20_000]
    before, after = (AutoTokenizer.from_pretrained(folder)(text).input_ids for folder in (source, out))
    assert before == after


CHILD = """
import sys
sys.modules["surgery"] = None  # the package is installed here; its users may not have it
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)(sys.argv[2]).input_ids)
assert not any(name.startswith("transformers_modules") for name in sys.modules)
"""


def test_a_tokenizer_loads_without_the_package_and_without_code(checkpoints, conversions):
    """Transformers 5 asks about the code of a config even for a tokenizer, unless it is told not to run any."""
    text, out = "def f(x): return x + 1", conversions("llama", LowRankSettings(**QUICK)).path
    done = Fork(out, text, code=CHILD, path=(), cwd=out)
    assert done.wait() == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == AutoTokenizer.from_pretrained(checkpoints("llama"))(text).input_ids


def test_text_is_cut_alike_where_the_named_class_is_overruled(checkpoints, tmp_path, monkeypatch):
    """Overrule the class as transformers 5.19 does for deepseek_v3: its way of cutting is then in tokenizer.json
    itself."""
    write = CheckpointWriter.write_json
    others = lambda self, name, value: None if name == "tokenizer_config.json" else write(self, name, value)  # noqa: E731
    monkeypatch.setattr(CheckpointWriter, "write_json", others)
    convert_checkpoint(checkpoints("qwen2"), tmp_path / "out", ConvertSettings(**QUICK))
    text = HELD_OUT.read_text(encoding="utf-8")[:20_000]
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoints("qwen2"), tmp_path / "out"))
    assert type(before) is not type(after) and before(text).input_ids == after(text).input_ids


def test_files_of_an_unfinished_conversion_load_no_tokenizer_again(checkpoints, tmp_path, monkeypatch):
    calls, measured = [], tokenizer_class._measured
    monkeypatch.setattr(tokenizer_class, "_KNOWN", {})
    monkeypatch.setattr(tokenizer_class, "_measured", lambda folder: calls.append(folder) or measured(folder))
    copy = shutil.copytree(checkpoints("llama"), tmp_path / "copy")
    (copy / ".surgery-partial").write_text("{}")
    first, second = tokenizer_class._cutting(checkpoints("llama")), tokenizer_class._cutting(copy)
    assert first.ids == second.ids and len(calls) == 1


def test_a_config_is_not_touched_without_need(checkpoints, conversions):
    folders = (checkpoints("llama"), conversions("llama", ConvertSettings(**QUICK)).path)
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in folders)
    assert before == after
