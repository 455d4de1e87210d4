"""Fewer KV heads, end to end on tiny models: plain checkpoints of the source's family, verified elsewhere."""

import json

import pytest
import torch
from conversions import convert_checkpoint
from loading import run_elsewhere
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, SHAPE, SHORT_TEXT, make_checkpoint, tokens
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from surgery.architectures.own_family import has_head_dim
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy
from surgery.model import SurgeryConfig
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.kv_heads.structure import requested_heads
from surgery.structures.registry import find_target

QUICK = {**SHORT_TEXT, "batch_size": 2}
SLOW = pytest.mark.slow
FAMILIES = ("llama", "llama3", "llama_bias", "mistral_window", "qwen2", "qwen2_window", "mixtral")


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Llama of four KV heads, the first two with large keys."""
    shape = {**SHAPE, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "wide", lambda: LlamaConfig(**shape, rms_norm_eps=1e-6, tie_word_embeddings=True))
        make_checkpoint(folder, "wide")
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        weights[f"model.layers.{layer}.self_attn.k_proj.weight"][:8] *= 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def converted(conversions):
    return lambda name, **settings: conversions(name, KVHeadsSettings(**{**QUICK, **settings}))


# Biases are qwen2's too, windows those of some of its layers.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[SLOW] * (n in ("llama_bias", "llama3", "mistral_window"))) for n in FAMILIES]
)
def test_the_result_is_a_plain_checkpoint_of_the_family(converted, checkpoints, name, tmp_path):
    result = converted(name)
    source, config = (AutoConfig.from_pretrained(path) for path in (checkpoints(name), result.path))
    assert (config.model_type, config.num_key_value_heads) == (source.model_type, 1)
    logits, cached, facts = run_elsewhere(result.path, tokens(2, 24), tmp_path)
    assert facts["class"] == type(load(checkpoints(name))).__name__
    assert (cached - logits).abs().max() / logits.abs().max() < 1e-4
    kv = result.report.kv
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"] == kv["source_bytes_per_token"] / 2
    # The reload is compared with the simulation by the conversion itself; both must have scored the same.
    stages = {row["stage"]: row["loss"] for row in result.report.ladder}
    assert stages["reloaded"] == pytest.approx(stages["merged"], abs=1e-4)


def test_everything_but_the_attention_is_copied_byte_for_byte(converted, checkpoints):
    source = load_file(checkpoints("qwen2") / "model.safetensors")
    tensors = load_file(converted("qwen2").path / "model.safetensors")
    assert set(tensors) == set(source)
    for name, tensor in source.items():
        if "self_attn" not in name:
            assert torch.equal(tensors[name], tensor), name
    assert tensors["model.layers.0.self_attn.k_proj.bias"].shape == (8,)
    assert (converted("qwen2").path / "tokenizer.json").exists()


def test_mean_pool_is_the_mean(converted, checkpoints):
    source = load_file(checkpoints("qwen2") / "model.safetensors")
    tensors = load_file(converted("qwen2", method="mean-pool").path / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.allclose(tensors[name], source[name].view(2, 8, -1).mean(0), atol=1e-6)


def test_report_and_card_say_what_it_is(converted):
    path = converted("llama").path
    report = json.loads((path / REPORT).read_text())
    assert report["target"]["to"] == "mqa" and report["target"]["kv_heads"] == 1
    assert report["layers"][0]["groups"] == [[0, 1]] and set(report["layers"][0]["measured"]) == {"merged"}
    card = (path / "README.md").read_text()
    assert "1 KV heads instead of 2" in card and "multi-query" in card and "import surgery" not in card
    planted = report["calibration"]["recall"]
    assert planted > 0 and f"{planted:.0%} of the sequences have planted facts" in card


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3", {}, "q/k-norm"),
        ("llama", {"kv_heads": 3}, "the source's 2 can be merged to 1"),
        ("llama", {"kv_heads": 2}, "can be merged to 1"),
        ("llama", {"kv_ratio": 0.25}, "convert --to mla instead"),
    ],
)
def test_what_cannot_be_done_is_refused(checkpoints, tmp_path, name, settings, message):
    with pytest.raises(SurgeryError, match=message):
        convert_checkpoint(checkpoints(name), tmp_path / "out", KVHeadsSettings(**{**QUICK, **settings}))
    assert not list(tmp_path.iterdir())


def test_a_ratio_is_one_of_whole_heads():
    def heads(source, ratio):
        size = torch.zeros(source, 2, 4)
        anatomy = AttentionAnatomy(q=size, k=size, v=size, o=torch.zeros(4, source, 2), inv_freq=torch.ones(1), scale=1)
        return requested_heads(KVHeadsSettings(kv_ratio=ratio), anatomy)

    assert [heads(4, ratio) for ratio in (0.25, 0.5, None)] == [1, 2, 2]
    assert heads(6, 0.33) == 2 and heads(6, 0.333) == 2 and heads(9, None) == 3
    with pytest.raises(
        SurgeryError, match=r"--kv-ratio 0\.3: does not give a divisor of the 4 KV heads; 0\.25 gives 1, 0\.5 gives 2$"
    ):
        heads(4, 0.3)
    with pytest.raises(SurgeryError, match=r"0\.1667 gives 1, 0\.3333 gives 2, 0\.5 gives 3$"):
        heads(6, 0.9)
    with pytest.raises(SurgeryError, match="convert --to mla instead"):
        heads(4, 0.2)


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_do_not_divide_are_refused_on_loading(heads):
    with pytest.raises(ValueError, match=f"4 query heads must be a multiple of {heads} KV heads"):
        SurgeryConfig.from_base(CONFIGS["llama"](), [None, {"kind": "grouped", "kv_heads": heads}])


def test_key_norm_deals_query_heads(wide, tmp_path):
    result = convert_checkpoint(wide, tmp_path / "out", KVHeadsSettings(**QUICK, method="key-norm", kv_heads=2))
    config = AutoConfig.from_pretrained(result.path)
    # Six query heads for the larger keys; groups of eight, as all heads have to divide the hidden size of 32.
    assert [layer.queries for layer in result.report.layers] == [(6, 2), (6, 2)]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 2, 4)
    assert config.model_type == "llama" and result.report.kv["ratio"] == 0.5
    queries = load_file(result.path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    messages = queries.view(16, -1).abs().amax(1) > 0
    assert messages.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert type(load(result.path)).__name__ == "LlamaForCausalLM"


def test_query_heads_are_added_only_where_the_config_tells_their_width():
    assert [name for name in FAMILIES if not has_head_dim(CONFIGS[name]())] == ["qwen2", "qwen2_window"]


def test_key_norm_of_one_head_is_mean_pool(converted):
    first, second = (
        load_file(converted("qwen2", method=method).path / "model.safetensors") for method in ("key-norm", "mean-pool")
    )
    assert set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_targets_take_their_own_settings():
    assert find_target("mqa").settings({"seed": 3}).kv_heads == 1
    with pytest.raises(SurgeryError, match="conflicts with --to mqa"):
        find_target("mqa").settings({"kv_heads": 2})
    with pytest.raises(SurgeryError, match="--to gqa: kv_lora_rank is for mla; gqa has no such setting"):
        find_target("gqa").settings({"kv_lora_rank": 8})
    with pytest.raises(SurgeryError, match=r"unknown target, choose mla, gqa, mqa, .*; did you mean gqa"):
        find_target("gga")
    with pytest.raises(SurgeryError, match="not both"):
        find_target("gqa").settings({"kv_heads": 2, "kv_ratio": 0.5})
