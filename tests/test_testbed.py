"""The figures that the README states for the demo model, measured as a stranger would: without this package."""

import json
import subprocess
import sys

import pytest
from conversions import convert_checkpoint
from safetensors.torch import save_file
from tiny_models import DEMO, HELD_OUT

from surgery.eval.recall import recall_prompts
from surgery.eval.sequences import random_windows, tokenize
from surgery.heads.scoring import score_heads
from surgery.heads.settings import HeadSettings
from surgery.running.loading import load_tokenizer
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings

SOURCE_LOSS = 2.2785

CHILD = """
import json, sys
sys.modules["surgery"] = None
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

data, path = load_file(sys.argv[1]), sys.argv[2]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=True).eval()
loss, right = [], 0
with torch.no_grad():
    for tokens in data["text"].split(4):
        logits = model(tokens, use_cache=False).logits[:, :-1]
        loss.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"))
    for tokens, asked in zip(data["recall"].split(4), data["answers"].split(4)):
        guess = model(tokens, use_cache=False).logits.argmax(-1)[:, :-1]
        right += int(((guess == tokens[:, 1:]) | ~asked[:, 1:]).all(1).sum())
recall = right / len(data["recall"])
print(json.dumps({"class": type(model).__name__, "loss": torch.cat(loss).mean().item(), "recall": recall}))
"""


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """Loss increase and recall of a checkpoint on the held-out text (24 x 1,024) and 48 recall prompts."""
    folder = tmp_path_factory.mktemp("testbed")
    tokenizer = load_tokenizer(DEMO)
    ids = tokenize(tokenizer, HELD_OUT.read_text(encoding="utf-8"))
    prompts = recall_prompts(tokenizer, ids, 48, 1024, 3)
    text = random_windows(ids, 24, 1024, 2, tokenizer.bos_token_id)
    save_file({"text": text, "recall": prompts.tokens, "answers": prompts.answer_mask}, folder / "data.safetensors")

    def run(path):
        process = subprocess.run(
            [sys.executable, "-I", "-c", CHILD, str(folder / "data.safetensors"), str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        document = json.loads(process.stdout.splitlines()[-1])
        print(f"\n{path}: loss {document['loss'] - SOURCE_LOSS:+.4f}, recall {document['recall']:.3f}")
        return document["class"], document["loss"] - SOURCE_LOSS, document["recall"]

    return run


OWN, LLAMA = "SurgeryForCausalLM", "LlamaForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "loads_as", "increase", "recall"),
    [
        (ConvertSettings(kv_ratio=0.5), OWN, 0.013, 0.83),
        (ConvertSettings(kv_ratio=0.25), OWN, 0.11, 0.40),
        (ConvertSettings(kv_ratio=0.125), OWN, 0.8, 0.0),
        (KVHeadsSettings(kv_heads=2), LLAMA, 0.14, 0.75),
        (KVHeadsSettings(kv_heads=1), LLAMA, 0.35, 0.6),
        (LowRankSettings(kv_ratio=0.5), OWN, 0.001, 0.83),
        (LowRankSettings(kv_ratio=0.25), OWN, 0.015, 0.83),
        (LowRankSettings(kv_ratio=0.125), OWN, 0.22, 0.75),
        (CrossLayerSettings(), OWN, 0.01, 0.8),
        (CrossLayerSettings(kv_ratio=0.0625), OWN, 0.02, 0.8),
    ],
)
def test_a_conversion_loses_no_more_than_it_did(measure, tmp_path, settings, loads_as, increase, recall):
    loaded_as, result, found_recall = measure(convert_checkpoint(DEMO, tmp_path / "out", settings).path)
    assert loaded_as == loads_as and result <= increase and found_recall >= recall - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "rope", "published"), [(0.5, 32, 0.136), (0.25, 32, 0.327), (0.125, 16, 1.16)])
def test_transmla_comes_out_where_its_public_code_does(measure, tmp_path, ratio, rope, published):
    """The comparison is fair: measured with its public code at the same settings, 48 x 512 tokens of plain text."""
    settings = ConvertSettings(
        method="transmla", kv_ratio=ratio, rope_dim=rope, freqfold=2, calibration_length=512, recall=0.0, held_out=1
    )
    _, result, _ = measure(convert_checkpoint(DEMO, tmp_path / "out", settings).path)
    assert result == pytest.approx(published, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["duo", "needle"])
def test_three_quarters_of_the_heads_can_stream(measure, tmp_path, method):
    options = HeadSettings(method=method, sinks=16, recent=112, length=1024)
    heads = score_heads(DEMO, tmp_path / "heads.safetensors", options).path
    settings = HybridSettings(heads=str(heads), streaming=0.75)
    result = convert_checkpoint(DEMO, tmp_path / "out", settings)
    loaded_as, increase, recall = measure(result.path)
    assert loaded_as == "SurgeryForCausalLM"
    assert result.report.kv["ratio"] < 0.35
    assert increase < 0.02 and recall >= 0.85


@pytest.mark.slow
def test_the_source_is_what_its_figures_say(measure):
    _, increase, recall = measure(DEMO)
    assert increase == pytest.approx(0, abs=1e-4) and recall == pytest.approx(41 / 48)
