"""Latent attention in the custom model class, and the class's configuration."""

import own_models as own
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from surgery.model import SurgeryConfig, SurgeryForCausalLM


@pytest.fixture
def model(source) -> SurgeryForCausalLM:
    return own.lossless_model(source)


@pytest.mark.parametrize("unrotated", [own.HEAD_DIM // 4, own.HEAD_DIM // 2], ids=["half", "no-rope"])
@pytest.mark.parametrize("family", ["llama", "qwen3"], indirect=True)
def test_keys_in_the_latent(source, unrotated):
    source.model.rotary_emb.inv_freq[-unrotated:] = 0
    model = own.lossless_model(source)
    full = model(own.tokens()).logits
    own.agree(full, source(own.tokens()).logits)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        own.agree(own.decode(model, cache), full)
    assert model.model.layers[0].self_attn.rope_dim == 2 * own.KV_HEADS * (own.HEAD_DIM // 2 - unrotated)


@pytest.mark.parametrize("family", own.MOE, indirect=True)
def test_experts_run_as_in_the_source(source):
    config = own.lossless_config(source)
    for choice in (None, "grouped_mm", "batched_mm"):
        config._experts_implementation = choice
        model = SurgeryForCausalLM(config)
        assert model.model.config._experts_implementation == config._experts_implementation == (choice or "grouped_mm")
    model.load_state_dict(own.lossless_tensors(source, source.state_dict()))
    own.agree(model.eval()(own.tokens()).logits, source(own.tokens()).logits)
    model.set_experts_implementation("eager")
    assert model.model.config._experts_implementation == model.config._experts_implementation == "eager"


def test_half_precision_keeps_the_frequencies(source, model, tmp_path):
    frequencies = torch.tensor(model.config.attention_layers[0]["rope_inv_freq"], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for half in (loaded, model.bfloat16()):
        assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
        for layer in half.model.layers:
            assert torch.equal(layer.self_attn.rotary.inv_freq, frequencies)
    exact = source(own.tokens()).logits
    assert (loaded(own.tokens()).logits.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("family", own.MOE, indirect=True)
def test_checkpoint_with_one_tensor_per_expert_loads(source, tmp_path):
    source.save_pretrained(tmp_path / "source")
    converted = own.lossless_tensors(source, load_file(tmp_path / "source" / "model.safetensors"))
    assert any(".experts.3." in name for name in converted), "the checkpoint should hold per-expert tensors"
    own.lossless_config(source).save_pretrained(tmp_path / "target")
    save_file(converted, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    own.agree(model(own.tokens()).logits, source(own.tokens()).logits)
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == converted.keys()


def test_layers_may_keep_their_own_attention_and_ranks_may_differ():
    source = own.tiny_source("qwen3")
    config = own.lossless_config(source)
    config.attention_layers[0] = None
    mixture = SurgeryForCausalLM(config).eval()
    tensors = own.lossless_tensors(source, source.state_dict())
    first = {name: tensor for name, tensor in source.state_dict().items() if ".layers.0." in name}
    mixture.load_state_dict({k: v for k, v in tensors.items() if ".layers.0." not in k} | first, strict=True)
    own.agree(mixture(own.tokens()).logits, source(own.tokens()).logits)
    own.agree(own.decode(mixture, DynamicCache(config=config)), source(own.tokens()).logits)

    config.attention_layers = [
        {"kind": "latent", "kv_lora_rank": 3, "rope_inv_freq": [], "key_norm_eps": None},
        {"kind": "latent", "kv_lora_rank": 7, "rope_inv_freq": [1.0, 0.3], "key_norm_eps": 1e-6},
    ]
    uneven = SurgeryForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    own.agree(own.decode(uneven, cache), uneven(own.tokens()).logits)
    assert [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in cache.layers] == [(3, 0), (7, 4 + own.KV_HEADS)]


def test_config_speaks_for_the_source_and_survives_the_file(source, tmp_path):
    frequencies = [1.0, 1 / 3, 0.1, 1e-300]
    layers = [{"kind": "latent", "kv_lora_rank": 5, "rope_inv_freq": frequencies, "key_norm_eps": None}] * own.LAYERS
    config = SurgeryConfig.from_base(source.config, layers)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is SurgeryConfig and loaded.attention_layers == layers
    theirs, ours = source.config.to_dict(), loaded.base_config().to_dict()
    assert ours["model_type"] == theirs["model_type"]
    for name in theirs.keys() - {"architectures", "_name_or_path", "model_type", "transformers_version"}:
        assert ours[name] == theirs[name] and getattr(loaded, name) == getattr(source.config, name), name


def test_legacy_fields_are_translated():
    source = {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
    config = SurgeryConfig.from_base(source, [None])
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert config.base_config().rope_parameters == config.rope_parameters
    assert config.dtype == torch.bfloat16


LAYER = {"kind": "latent", "kv_lora_rank": 4, "rope_inv_freq": [], "key_norm_eps": None}
REFUSED = {
    "has attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
    "has final_logit_softcapping": {"final_logit_softcapping": 30.0},
    "2 entries, must have 3": {"num_hidden_layers": 3, "attention_layers": [LAYER] * 2},
    "at least 1": {"num_hidden_layers": 1, "attention_layers": [{**LAYER, "kv_lora_rank": 0}]},
    "has keys": {"num_hidden_layers": 1, "attention_layers": [{"kind": "latent", "kv_lora_rank": 4}]},
    "has no k_norm": {"num_hidden_layers": 1, "attention_layers": [{**LAYER, "key_norm_eps": 1e-6}]},
    "attention_layers is missing": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_carried_is_refused(message):
    with pytest.raises(ValueError, match=message):
        SurgeryForCausalLM(SurgeryConfig(**own.SHAPE | REFUSED[message]))
