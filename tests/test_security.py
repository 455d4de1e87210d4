"""Promises of SECURITY.md that no other test guards, and the tests that it names."""

import json
import re
from pathlib import Path

import pytest
from command_line import run_main
from tiny_models import SHORT_TEXT_FLAGS, make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
"""


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """A checkpoint with code next to its weights, and the file that this code would make."""
    folder = tmp_path_factory.mktemp("trap")
    source, marker = make_checkpoint(folder / "source", "llama"), folder / "ran"
    (source / "code.py").write_text(CODE.format(marker=str(marker)))
    for name, entries in {
        "config.json": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]},
    }.items():
        content = json.loads((source / name).read_text()) | {"auto_map": entries}
        (source / name).write_text(json.dumps(content))
    return source, marker


@pytest.mark.parametrize(
    "verb",
    [
        ["inspect"],
        ["doctor"],
        ["convert", "--to", "gqa", *SHORT_TEXT_FLAGS],
        ["eval", "--tasks", "loss", "--windows", "1", "--length", "64", "--variants", "none"],
    ],
    ids=lambda verb: verb[0],
)
def test_no_code_of_a_checkpoint_runs(verb, trap, tmp_path, monkeypatch, capsys):
    source, marker = trap
    out = ["--out", tmp_path / "out"] if verb[0] in ("convert", "eval") else []
    code, _, err = run_main(monkeypatch, capsys, verb[0], source, *verb[1:], *out)
    assert code == 0, err
    assert not marker.exists()


def test_the_trap_works(trap, monkeypatch):
    from transformers import AutoConfig, LlamaConfig

    # What code of a checkpoint named, transformers would save next to every model of that class from then on.
    monkeypatch.setattr(LlamaConfig, "_auto_class", None)
    source, marker = trap
    AutoConfig.from_pretrained(source, trust_remote_code=True)
    ran = marker.exists()
    marker.unlink(missing_ok=True)
    assert ran


def test_the_tests_that_the_policy_names_exist():
    matches = re.findall(r"`(tests/[^`]+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(matches) >= 6 and all((ROOT / name).is_file() for name in matches), matches
