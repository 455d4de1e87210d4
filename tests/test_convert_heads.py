"""Fewer KV heads, end to end on tiny models: plain checkpoints of the source's family, verified elsewhere."""

import copy
import json

import pytest
import torch
from conversions import convert_checkpoint
from loading import run_elsewhere
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, SHAPE, SHORT_TEXT, make_checkpoint, tokens
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, StaticCache

from surgery.architectures.decilm import check, feed_forward_width
from surgery.architectures.own_family import has_head_dim
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy
from surgery.model import SurgeryConfig, register
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.kv_heads.structure import requested_heads
from surgery.structures.registry import find_target

QUICK = {**SHORT_TEXT, "batch_size": 2}
SLOW = pytest.mark.slow
# Three of the four KV heads of two layers.
BY_LAYER = {"allocate": "spectrum", "kv_ratio": 0.75}
FAMILIES = ("llama", "llama3", "llama_bias", "mistral_window", "qwen2", "qwen2_window", "mixtral")


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Llama of four KV heads, the first two with large keys, and a feed-forward width that DeciLM can express."""
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
        ("llama", {"kv_ratio": 0.25, "allocate": "spectrum"}, "at least one"),
        ("llama", {"carrier": "decilm"}, "not a multiple of 256"),
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
        return requested_heads(KVHeadsSettings(kv_ratio=ratio), anatomy, layers=10) // 10

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


@pytest.mark.parametrize("name", ["llama_bias", "qwen2", pytest.param("mixtral", marks=SLOW)])
def test_layers_may_keep_different_numbers_of_heads(converted, checkpoints, name):
    result = converted(name, **BY_LAYER)
    heads = result.report.target["kv_heads"]
    assert sorted(heads) == [1, 2] and result.report.target["model_type"] == "surgery"
    entries = json.loads((result.path / "config.json").read_text())["attention_layers"]
    assert entries == [None if count == 2 else {"kind": "grouped", "kv_heads": 1} for count in heads]
    kv = result.report.kv
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"] == kv["source_bytes_per_token"] * 0.75
    remaining = result.report.layers[heads.index(2)]
    assert remaining.groups == ((0,), (1,)) and remaining.key_error == 0 and remaining.measured["merged"] < 1e-5
    source, files = (load_file(path / "model.safetensors") for path in (checkpoints(name), result.path))
    untouched = [key for key in source if f"layers.{remaining.layer}.self_attn" in key]
    assert set(source) == set(files) and all(torch.equal(source[key], files[key]) for key in untouched)


@pytest.mark.parametrize("batch", [1, 4])
def test_caches_hold_as_many_heads_as_the_layer(converted, batch):
    result = converted("llama_bias", **BY_LAYER)
    register()
    model, heads = load(result.path), result.report.target["kv_heads"]
    with torch.no_grad():
        plain = model(tokens(batch, 20)).past_key_values
        static = StaticCache(config=model.config, max_cache_len=32)
        model(tokens(batch, 20), past_key_values=static)
    for cache in (plain, static):
        assert [layer.keys.shape[1] for layer in cache.layers] == heads
    live = sum(part.nbytes for layer in plain.layers for part in (layer.keys, layer.values))
    assert live == model.kv_cache_bytes(batch, 20) == batch * 20 * result.report.kv["measured_bytes_per_token"]


def test_layers_that_differ_load_without_the_package(converted, tmp_path):
    result = converted("qwen2", **BY_LAYER)
    logits, cached, facts = run_elsewhere(result.path, tokens(2, 12), tmp_path, trust=True)
    assert facts["class"] == "SurgeryForCausalLM"
    assert (cached - logits).abs().max() / logits.abs().max() < 1e-4
    assert facts["cached_numbers"] == 3 * 2 * 8 * 2 * 12


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_do_not_divide_are_refused_on_loading(heads):
    with pytest.raises(ValueError, match=f"4 query heads must be a multiple of {heads} KV heads"):
        SurgeryConfig.from_base(CONFIGS["llama"](), [None, {"kind": "grouped", "kv_heads": heads}])


def test_one_number_for_all_layers_stays_in_the_family(converted):
    result = converted("llama", allocate="spectrum", kv_heads=1)
    assert (result.report.target["kv_heads"], result.report.target["model_type"]) == (1, "llama")
    own = converted("llama", carrier="own")
    assert (own.report.target["kv_heads"], own.report.target["model_type"]) == (1, "surgery")
    assert own.report.ladder[-1]["loss"] == pytest.approx(result.report.ladder[-1]["loss"], abs=1e-5)


def test_decilm(wide, tmp_path):
    settings = {**QUICK, "allocate": "spectrum", "kv_heads": 3}
    own = convert_checkpoint(wide, tmp_path / "own", KVHeadsSettings(**settings))
    result = convert_checkpoint(wide, tmp_path / "decilm", KVHeadsSettings(**settings, carrier="decilm"))
    heads = result.report.target["kv_heads"]
    assert sorted(heads) == [2, 4] and heads == own.report.target["kv_heads"]  # three on average
    plain = json.loads((result.path / "config.json").read_text())
    assert (plain["architectures"], plain["model_type"]) == (["DeciLMForCausalLM"], "nemotron-nas")
    assert [block["attention"]["n_heads_in_group"] for block in plain["block_configs"]] == [8 // n for n in heads]
    assert all(feed_forward_width(block["ffn"]["ffn_mult"], 32) == 256 for block in plain["block_configs"])
    assert "attention_layers" not in plain and result.report.target["engines"]["transformers"]["status"] == "refused"
    assert not (result.path / "modeling_surgery.py").exists()
    # vLLM reads attributes, from a class that comes with the checkpoint.
    config = AutoConfig.from_pretrained(result.path, trust_remote_code=True)
    for twin in (config, copy.deepcopy(config)):
        assert [8 // block.attention.n_heads_in_group for block in twin.block_configs] == heads
        assert not twin.block_configs[0].attention.no_op and not hasattr(twin.block_configs[0].ffn, "hidden_act")
    assert json.loads(config.to_json_string())["block_configs"] == plain["block_configs"]
    files, expected = (load_file(path / "model.safetensors") for path in (result.path, own.path))
    assert set(files) == set(expected) and all(torch.equal(files[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "DeciLM holds llama only"),
        ({"attention_bias": True}, "biases"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "RoPE types"),
        ({"intermediate_size": 48}, "48 is not a multiple of 256; use --carrier own"),
    ],
)
def test_decilm_refuses_what_engines_would_read_otherwise(wide, change, message):
    config = json.loads((wide / "config.json").read_text())
    check(config)
    with pytest.raises(SurgeryError, match=message):
        check({**config, **change})


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allocate": "spectrum", "method": "mean-pool"}, "requires method fisher"),
        ({"allocate": "spectrum", "calibration": "none"}, "requires method fisher and calibration text"),
        ({"method": "key-norm", "carrier": "own"}, "drop --carrier"),
        ({"carrier": "stock"}, "choose auto, own, decilm"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(SurgeryError, match=message):
        KVHeadsSettings(**settings)


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
