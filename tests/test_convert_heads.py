"""Fewer KV heads, end to end on tiny models: plain checkpoints of the source's family, verified elsewhere."""

import json

import pytest
import torch
from loading import run_elsewhere
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from surgery.carry_over import REPORT
from surgery.convert_heads import convert_to_gqa
from surgery.errors import SurgeryError
from surgery.settings import KVHeadsSettings
from surgery.targets import find_target

QUICK = {
    "calibration_tokens": 256,
    "calibration_length": 64,
    "held_out": 1,
    "fit_steps": 1,
    "fit_iterations": 2,
    "batch_size": 2,
}
FAMILIES = ("llama", "llama3", "llama_bias", "mistral_window", "qwen2", "qwen2_window", "mixtral")


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def converted(checkpoints, tmp_path_factory):
    made = {}

    def get(name, **settings):
        key = (name, *sorted(settings.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("out") / f"{name}-gqa"
            made[key] = convert_to_gqa(checkpoints(name), out, KVHeadsSettings(**{**QUICK, **settings}))
        return made[key]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_the_result_is_a_plain_checkpoint_of_the_family(converted, checkpoints, name, tmp_path):
    result = converted(name)
    source, config = (AutoConfig.from_pretrained(path) for path in (checkpoints(name), result.path))
    assert (config.model_type, config.num_key_value_heads) == (source.model_type, 1)
    tokens = torch.randint(4096, (2, 24), generator=torch.Generator().manual_seed(0))
    logits, cached, facts = run_elsewhere(result.path, tokens, tmp_path)
    assert facts["class"] == type(load(checkpoints(name))).__name__
    assert (cached - logits).abs().max() / logits.abs().max() < 1e-4
    kv = result.report.kv
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"] == kv["source_bytes_per_token"] / 2
    # The reload is compared with the simulation by the conversion itself; both must have scored the same.
    ladder = {row["stage"]: row["loss"] for row in result.report.ladder}
    assert ladder["reloaded"] == pytest.approx(ladder["fitted"], abs=1e-4)


def test_everything_but_the_attention_is_copied_byte_for_byte(converted, checkpoints):
    source = load_file(checkpoints("qwen2") / "model.safetensors")
    written = load_file(converted("qwen2").path / "model.safetensors")
    assert set(written) == set(source)
    for name, tensor in source.items():
        if "self_attn" not in name:
            assert torch.equal(written[name], tensor), name
    assert written["model.layers.0.self_attn.k_proj.bias"].shape == (8,)
    assert (converted("qwen2").path / "tokenizer.json").exists()


def test_heads_that_are_equal_merge_without_loss(checkpoints, tmp_path):
    """Two KV heads with the same weights are one: the result computes what the source does."""
    source = tmp_path / "source"
    source.mkdir()
    for file in checkpoints("llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = tensor[:8].repeat(2, 1)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    settings = KVHeadsSettings(**{**QUICK, "fit_steps": 0})
    result = convert_to_gqa(source, tmp_path / "out", settings)
    tokens = torch.arange(40)[None] * 7
    with torch.no_grad():
        expected, found = load(source)(tokens).logits, load(result.path)(tokens).logits
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5
    assert max(layer.measured["merged"] for layer in result.report.layers) < 1e-5


def test_half_precision_stays_half_precision(checkpoints, tmp_path):
    source = checkpoints("llama", torch.bfloat16)
    result = convert_to_gqa(source, tmp_path / "out", KVHeadsSettings(**QUICK))
    written = load_file(result.path / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert result.report.kv["measured_bytes_per_token"] == 2 * 2 * 8 * 2


@pytest.mark.parametrize("method", ["kv-heads", "procrustes", "mean-pool"])
def test_named_methods(converted, method):
    result = converted("llama", method=method)
    assert result.report.target["method"] == method
    assert [row["stage"] for row in result.report.ladder] == ["source", "merged", "reloaded"]


def test_mean_pool_is_the_mean(converted, checkpoints):
    source = load_file(checkpoints("llama") / "model.safetensors")
    written = load_file(converted("llama", method="mean-pool").path / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.allclose(written[name], source[name].view(2, 8, -1).mean(0), atol=1e-6)


def test_weights_alone(converted):
    result = converted("llama", calibration="none")
    assert result.report.ladder[0]["loss"] is None and result.report.kv["ratio"] == 0.5


def test_report_and_card_say_what_it_is(converted):
    path = converted("llama").path
    report = json.loads((path / REPORT).read_text())
    assert report["target"]["to"] == "mqa" and report["target"]["kv_heads"] == 1
    assert report["layers"][0]["groups"] == [[0, 1]] and set(report["layers"][0]["measured"]) == {"merged", "fitted"}
    card = (path / "README.md").read_text()
    assert "1 KV heads in place of 2" in card and "multi-query" in card and "import surgery" not in card


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("qwen3", {}, "q/k-norm"),
        ("llama", {"kv_heads": 3}, "the source's 2 can become 1"),
        ("llama", {"kv_heads": 2}, "can become 1"),
        ("llama", {"kv_ratio": 0.25}, "convert --to mla instead"),
    ],
)
def test_what_cannot_be_done_is_refused(checkpoints, tmp_path, name, settings, told):
    with pytest.raises(SurgeryError, match=told):
        convert_to_gqa(checkpoints(name), tmp_path / "out", KVHeadsSettings(**{**QUICK, **settings}))
    assert not list(tmp_path.iterdir())


def test_targets_take_their_own_settings():
    assert find_target("mqa").settings({"seed": 3}).kv_heads == 1
    with pytest.raises(SurgeryError, match="contradicts --to mqa"):
        find_target("mqa").settings({"kv_heads": 2})
    with pytest.raises(SurgeryError, match="--to gqa: unknown setting 'kv_lora_rank'"):
        find_target("gqa").settings({"kv_lora_rank": 8})
    with pytest.raises(SurgeryError, match=r"unknown target, choose mla, gqa, mqa, .*; did you mean gqa"):
        find_target("gga")
    with pytest.raises(SurgeryError, match="not both"):
        find_target("gqa").settings({"kv_heads": 2, "kv_ratio": 0.5})
    with pytest.raises(SurgeryError, match="dry-run"):
        find_target("gqa").plan("x", None, None)
