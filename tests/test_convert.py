"""Conversions of tiny models of every family, end to end: written, loaded elsewhere, compared with the simulation."""

import json
from functools import cache

import pytest
import torch
from conversions import convert_checkpoint
from loading import run_elsewhere
from tiny_models import CONFIGS, FAMILIES, HELD_OUT, SHAPE, SHORT_TEXT, STOCK, make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.engines.verdict import LOADS, LOADS_WITH, NOT_TRIED
from surgery.structures.converter import Conversion
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.stages import StageTracker

QUICK = {**SHORT_TEXT, "kv_ratio": 0.5, "calibration_tokens": 512, "held_out": 2}
# By default one family of each kind: those whose attention another's holds too are slow.
PLAIN = "mistral", "qwen2", "qwen2_window", "llama3"
# Norms are qwen3_moe's too, its experts mixtral's but for their names.
TRIED = [pytest.param(name, marks=[pytest.mark.slow] * (name in (*PLAIN, "qwen3", "mixtral"))) for name in FAMILIES]


@pytest.fixture(scope="module")
def converted(checkpoints, tmp_path_factory):
    """Converts a family once; returns folder, report and the simulation's final hidden states with their stream."""

    @cache
    def get(name: str, dtype: torch.dtype = torch.float32, **settings):
        runs = []
        original = StageTracker.__init__

        def remember(self, *args, **kwargs):
            original(self, *args, **kwargs)
            runs.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageTracker, "__init__", remember)
            out = tmp_path_factory.mktemp("out") / f"{name}-mla"
            options = ConvertSettings(**{"carrier": "stock" if name in STOCK else "own", **QUICK, **settings})
            result = convert_checkpoint(checkpoints(name, dtype), out, options)
        return result, runs[0]

    return get


@pytest.fixture(scope="module")
def elsewhere(converted, tmp_path_factory):
    """Return the outputs of a family's result in another process, on all held-out tokens."""

    @cache
    def get(name: str):
        result, runs = converted(name)
        folder = tmp_path_factory.mktemp("elsewhere")
        return run_elsewhere(result.path, runs._held_out.tokens, folder, trust=name not in STOCK)

    return get


def simulated_logits(result: Conversion, runs: StageTracker) -> torch.Tensor:
    return runs._stream.logits(runs.hidden["truncated"])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative difference on the sequences of b: a form without choices is simulated on a few texts."""
    return float((a[: len(b)] - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", TRIED)
def test_written_checkpoint_equals_simulation_elsewhere(converted, elsewhere, name):
    result, runs = converted(name)
    stock = name in STOCK
    logits, cached, facts = elsewhere(name)
    assert facts["class"] == ("DeepseekV3ForCausalLM" if stock else "SurgeryForCausalLM")
    assert relative(logits, simulated_logits(result, runs)) < 1e-4
    assert relative(cached, logits) < 1e-4
    target = result.report.target
    assert target["model_type"] == ("deepseek_v3" if stock else "surgery")


@pytest.mark.parametrize("name", [name for name in TRIED if "window" not in str(name)])
def test_live_cache_takes_the_promised_bytes(converted, elsewhere, name):
    result, runs = converted(name)
    _, _, facts = elsewhere(name)
    kv = result.report.kv
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"]
    assert facts["cached_numbers"] * 4 == kv["predicted_bytes_per_token"] * runs._held_out.tokens.numel()
    assert kv["ratio"] <= 0.5


@pytest.mark.parametrize("name", TRIED)
def test_exact_stages_lose_nothing(converted, name):
    report = converted(name)[0].report
    stages = {row["stage"]: row for row in report.ladder}
    for stage in ("merged", "rotated"):
        assert stages[stage]["logit_difference"] < 2e-5
    assert stages["reloaded"]["loss"] == pytest.approx(stages["truncated"]["loss"], abs=1e-4)


def test_stock_frequencies_are_the_sources_bit_for_bit(converted, tmp_path):
    """A frequency list goes through longrope factors; the rotation must not drift over 100k tokens."""
    result, runs = converted("llama3", rope_dim=16, calibration="none")
    _, _, facts = run_elsewhere(result.path, runs._held_out.tokens[:1, :8], tmp_path)
    assert facts["inv_freq"] == result.report.target["inverse_frequencies"]


@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("llama", {}, "tiny"),
        ("llama3", {}, "constant"),
        ("mistral", {"rope_frequencies": "grid"}, "tiny"),
    ],
)
def test_both_neutral_norms_are_exact(converted, elsewhere, name, settings, kind, tmp_path):
    result, runs = converted(name, **settings)
    assert result.report.target["latent_norm"] == kind
    logits = run_elsewhere(result.path, runs._held_out.tokens, tmp_path)[0] if settings else elsewhere(name)[0]
    assert relative(logits, simulated_logits(result, runs)) < 1e-4


def test_grid_of_a_model_without_biases_loads_everywhere(converted):
    result, _ = converted("mistral", rope_frequencies="grid")
    config = json.loads((result.path / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "default"
    assert config["attention_bias"] is False and config["rms_norm_eps"] == 1e-6
    engines = result.report.target["engines"]
    assert engines["transformers"]["status"] == LOADS and engines["llama.cpp"]["status"] == LOADS_WITH
    assert engines["SGLang"]["status"] == NOT_TRIED
    assert result.report.target["residual_rescale"] == pytest.approx(0.1**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_low_precision_weights_stay_within_their_own_floor(converted, dtype, tmp_path):
    """KL of the written model to the simulation, against KL of the source rounded to the same dtype to itself."""
    result, runs = converted("llama", dtype)
    tokens = runs._held_out.tokens
    name = str(dtype).removeprefix("torch.")
    logits, _, _ = run_elsewhere(result.path, tokens, tmp_path, dtype=name)

    def divergence(low, high):
        high, low = high.double().log_softmax(-1), low.double().log_softmax(-1)
        return float((high.exp() * (high - low)).sum(-1).mean())

    source = runs._stream.reader.path
    with torch.no_grad():
        full = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens).logits
        low = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)(tokens).logits
    floor = divergence(low, full)
    simulated = simulated_logits(result, runs)
    assert divergence(logits[: len(simulated)], simulated) < 4 * floor
    dtypes = {CheckpointReader.open(result.path).info(n).dtype for n in CheckpointReader.open(result.path).names()}
    assert dtypes == {dtype}


def test_only_attention_changes_and_sidecars_come_along(checkpoints, tmp_path):
    source = make_checkpoint(tmp_path / "src", "llama")
    (source / "README.md").write_text("the source's card")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    result = convert_checkpoint(source, None, ConvertSettings(calibration="none", kv_ratio=0.5, max_shard_size="100KB"))
    assert result.path == (tmp_path / "src-mla").resolve()
    before, after = CheckpointReader.open(source), CheckpointReader.open(result.path)
    assert (result.path / "model.safetensors.index.json").is_file()
    for name in before.names():
        if name.endswith("input_layernorm.weight"):  # which stock MLA scales
            factors = (after.tensor(name).double() / before.tensor(name).double()).unique()
            assert len(factors) == 1 and float(factors.log2()).is_integer(), name
        elif ".self_attn." not in name:
            assert torch.equal(before.tensor(name), after.tensor(name)), name
    assert (result.path / "README.source.md").read_text() == "the source's card"
    assert (result.path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "KV cache" in (result.path / "README.md").read_text()
    AutoTokenizer.from_pretrained(result.path)
    report = json.loads((result.path / "surgery_report.json").read_text())
    assert report["source"]["sha256"] == before.fingerprint()
    assert len(report["layers"]) == 2 and report["seconds"]


@pytest.mark.parametrize(
    "settings", [{"carrier": "own"}, {"carrier": "own", "allocate": "spectrum", "rope_dim": 4}], ids=["all", "ranks"]
)
def test_one_budget_is_spread_over_layers_of_the_custom_class(converted, tmp_path, settings):
    result, runs = converted("llama", **settings)
    target, kv = result.report.target, result.report.kv
    logits, _, facts = run_elsewhere(result.path, runs._held_out.tokens, tmp_path, trust=True)
    assert facts["class"] == "SurgeryForCausalLM"
    assert relative(logits, simulated_logits(result, runs)) < 1e-4
    uniform, _ = converted("llama", carrier="own", allocate="uniform")
    numbers = [rank + rotated for rank, rotated in zip(target["kv_lora_ranks"], target["rope_dims"], strict=True)]
    assert len(set(numbers)) > 1
    assert (len(set(target["rope_dims"])) > 1) == ("rope_dim" not in settings)
    assert kv["measured_bytes_per_token"] == uniform.report.kv["measured_bytes_per_token"]
    assert kv["measured_bytes_per_token"] == sum(numbers) * 4
    model = AutoModelForCausalLM.from_pretrained(result.path, trust_remote_code=True).eval()
    prompt = runs._held_out.tokens[:2, :20]
    cached = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(cached, model.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=False))


def test_a_stock_class_has_one_rank():
    with pytest.raises(SurgeryError, match="stock deepseek_v3 has one rank for all layers; drop --carrier stock"):
        ConvertSettings(allocate="spectrum", carrier="stock")


def test_engines_get_no_custom_class(checkpoints, tmp_path):
    """A key norm takes the custom model class, which no engine loads without our code."""
    with pytest.raises(SurgeryError, match="stock deepseek_v3 cannot hold this model"):
        convert_checkpoint(
            checkpoints("qwen3"),
            tmp_path / "out",
            ConvertSettings(engine="llama.cpp", kv_ratio=0.8, calibration="none"),
        )
    with pytest.raises(SurgeryError, match="reads stock classes"):
        ConvertSettings(engine="vllm", carrier="own")


@pytest.mark.parametrize("name", ["llama_bias", "mistral_window", "qwen3"])
def test_weights_alone(checkpoints, tmp_path, name):
    settings = ConvertSettings(calibration="none", kv_ratio=0.5)
    result = convert_checkpoint(checkpoints(name), tmp_path / "out", settings)
    assert result.report.kv["measured_bytes_per_token"] <= 0.5 * result.report.kv["source_bytes_per_token"]
    assert result.report.ladder[-1]["loss"] is None
    card = (result.path / "README.md").read_text()
    assert "from the weights alone" in card and "Without text no loss was measured" in card and "calibrated" not in card


def test_a_wrong_tensor_is_caught_before_the_output_gets_its_name(checkpoints, tmp_path, monkeypatch):
    """Verification by running: a writer that permutes rotary rows wrongly passes every check of files."""
    monkeypatch.setattr("surgery.architectures.deepseek_v3.interleaving", lambda rope: torch.arange(rope))
    with pytest.raises(SurgeryError, match="differ from the simulation"):
        convert_checkpoint(checkpoints("llama"), tmp_path / "out", ConvertSettings(calibration="none", kv_ratio=0.5))
    assert list(tmp_path.iterdir()) == []


def test_biases_of_feed_forward_layers_take_the_custom_class(tmp_path, monkeypatch):
    biased = LlamaConfig(**SHAPE, rms_norm_eps=1e-5, head_dim=16, mlp_bias=True)
    monkeypatch.setitem(CONFIGS, "mlp_bias", lambda: biased)
    source, settings = make_checkpoint(tmp_path / "source", "mlp_bias"), {"calibration": "none", "kv_ratio": 0.5}
    target = convert_checkpoint(source, tmp_path / "out", ConvertSettings(**settings)).report.target
    assert target["model_type"] == "surgery" and "biases" in " ".join(target["reasons"])


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_layers_that_run_in_bfloat16_are_measured_in_float32(checkpoints, tmp_path, name):
    """Biases and key norms; moments of 16-bit products have no inverse."""
    text = {"calibration": str(HELD_OUT), "calibration_tokens": 512, "calibration_length": 64}
    settings = ConvertSettings(**{**QUICK, **text}, dtype="bfloat16")
    report = convert_checkpoint(checkpoints(name), tmp_path / "out", settings).report
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in report.ladder if row.get("loss") is not None)
