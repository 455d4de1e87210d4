"""Low-rank keys and values, end to end on tiny models: verified here and elsewhere."""

import pytest
import torch
from conversions import convert_checkpoint
from loading import run_elsewhere
from tiny_models import SHORT_TEXT, tokens
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.low_rank.structure import LOW_RANK, RESIDUAL_WINDOW

QUICK = {**SHORT_TEXT, "keep_layers": "none", "batch_size": 2}
FAMILIES = ("llama", "llama3", "llama_bias", "mistral_window", "qwen2", "qwen2_window", "qwen3", "mixtral", "qwen3_moe")
DEFAULT = {
    "alone": ("llama", "llama_bias", "qwen2_window", "qwen3_moe"),
    "window": ("llama", "llama_bias", "qwen2_window"),
}
"""Biases, windows of a family's own, norms and experts; other rotations are tests/families/test_matrix.py's."""
KINDS = {
    "alone": LowRankSettings,
    "window": lambda **settings: LowRankSettings(window=5, sinks=2, **settings),
}


@pytest.fixture
def converted(conversions):
    return lambda name, kind="alone", **settings: conversions(name, KINDS[kind](**{**QUICK, **settings}))


PAIRS = [
    pytest.param(name, kind, marks=[] if name in DEFAULT[kind] else pytest.mark.slow)
    for kind in KINDS
    for name in FAMILIES
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_the_result_computes_and_caches_what_was_promised(converted, name, kind):
    if kind == "window" and "window" in name:
        with pytest.raises(SurgeryError, match="models with sliding-window layers"):
            converted(name, kind)
        return
    report = converted(name, kind).report
    kv, stages = report.kv, {row["stage"]: row["loss"] for row in report.ladder}
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"]
    if kind != "window":
        assert kv["measured_bytes_per_token"] <= kv["source_bytes_per_token"] / 4
    # The reload is compared with the simulation by the conversion itself; both must have scored the same.
    files = RESIDUAL_WINDOW if RESIDUAL_WINDOW in stages else LOW_RANK
    assert stages["reloaded"] == pytest.approx(stages[files], abs=1e-4)


@pytest.mark.parametrize(("name", "kind"), [("qwen3", "alone"), ("llama_bias", "window")])
def test_the_result_loads_without_the_package(converted, name, kind, tmp_path):
    logits, cached, facts = run_elsewhere(converted(name, kind).path, tokens(2, 24), tmp_path, trust=True)
    assert facts["class"] == "SurgeryForCausalLM"
    assert (cached - logits).abs().max() / logits.abs().max() < 1e-4


def test_ranks_follow_the_allocation(converted):
    ranks = {
        allocate: converted("llama", allocate=allocate, kv_ratio=0.25).report.target["ranks"]
        for allocate in ("uniform", "spectrum")
    }
    assert len(set(ranks["uniform"])) == 1
    assert all(sum(result) == sum(ranks["uniform"]) for result in ranks.values())
    assert converted("llama", kv_ratio=0.25).report.target["ranks"] == ranks["spectrum"]


def test_weights_alone(converted):
    result = converted("llama_bias", calibration="none")
    assert [row["stage"] for row in result.report.ladder] == ["source", "low rank", "reloaded"]
    assert len(set(result.report.target["ranks"])) == 1


def test_live_cache_of_long_batches_is_what_the_model_predicts(converted):
    for kind in ("alone", "window"):
        model = AutoModelForCausalLM.from_pretrained(converted("llama", kind).path, dtype="auto").eval()
        for batch in (1, 4):
            prompt = tokens(batch, 1000)
            with torch.no_grad():
                cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
                for _ in range(3):
                    model(prompt[:, :1], past_key_values=cache)
                cache = model(prompt[:, :197], past_key_values=cache).past_key_values
            assert cache_bytes(cache) == model.kv_cache_bytes(batch, 1200)


REFUSED = {
    "choose fewer than": ("llama", {"rank": 10**6}),
    "pass rank or kv_ratio": ("llama", {"rank": 4, "kv_ratio": 0.5}),
    "sinks need a window": ("llama", {"sinks": 4}),
    "method fisher or separate": ("llama", {"method": "svd-llm", "allocate": "spectrum"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_impossible_is_refused(checkpoints, message, tmp_path):
    name, settings = REFUSED[message]
    with pytest.raises(SurgeryError, match=message):
        convert_checkpoint(checkpoints(name), tmp_path / "out", LowRankSettings(**{**QUICK, **settings}))
    assert not (tmp_path / "out").exists()
