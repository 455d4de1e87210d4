"""The latent model class against its source: exact where the conversion is exact, and honest about its cache."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from surgery.model import AUTO_MAP, SurgeryConfig, SurgeryForCausalLM, register, remote_code_files

register()

HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 4, 2, 8, 2, 64
LATENT = KV_HEADS * HEAD_DIM
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "initializer_range": 0.2}
SHAPE |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128}
SHAPE |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DENSE = {"intermediate_size": 48}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 24}
FAMILIES = {
    "llama": {**DENSE, "head_dim": HEAD_DIM, "attention_bias": True},
    "mistral": {**DENSE, "head_dim": HEAD_DIM, "sliding_window": 6},
    "qwen2": {**DENSE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {**DENSE, "head_dim": HEAD_DIM, "attention_bias": True, "tie_word_embeddings": True},
    "mixtral": {**EXPERTS, "head_dim": HEAD_DIM, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "head_dim": HEAD_DIM, "num_experts": 4, "moe_intermediate_size": 24},
}
WITH_KEY_NORM = ("qwen3", "qwen3_moe")
FULL_ATTENTION = ("llama", "qwen3", "mixtral", "qwen3_moe")
MOE = ("mixtral", "qwen3_moe")


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_no_gradients():
    """On matrices this small threads only wait for each other, up to 200 times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def tiny_source(family: str) -> PreTrainedModel:
    """A random source model in which every bias and norm matters."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SHAPE, **FAMILIES[family])
    # transformers' grouped_mm has no fast path on a CPU.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.5)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return model


def latent_attention_tensors(attention: torch.nn.Module, inv_freq: torch.Tensor) -> dict[str, torch.Tensor]:
    """The lossless latent form: rotated pairs of every KV head in the rope part, the rest beside the values.

    Half-split pair (l, l + d/2) of KV head g becomes one interleaved pair; pairs of frequency 0 need no rotation and
    join the latent, which then holds [v ; unrotated k].
    """
    norm = attention.k_norm.weight if hasattr(attention, "k_norm") else torch.ones(HEAD_DIM)
    half = HEAD_DIM // 2
    pairs = [(g, pair) for g in range(KV_HEADS) for pair in range(half)]
    pairs.sort(key=lambda g_and_pair: bool(inv_freq[g_and_pair[1]]))  # the unrotated first, into the latent
    key_dims = [(g, dim) for g, pair in pairs for dim in (pair, pair + half)]
    rows, scale = [g * HEAD_DIM + dim for g, dim in key_dims], norm[[dim for _, dim in key_dims]]
    key, value = attention.k_proj, attention.v_proj
    tensors = {"kv_down.weight": torch.cat((value.weight, key.weight[rows] * scale[:, None]))}
    if key.bias is not None:
        tensors["kv_down.bias"] = torch.cat((value.bias, key.bias[rows] * scale))
    rank = LATENT + 2 * sum(inv_freq[pair] == 0 for _, pair in pairs)
    query_up = torch.zeros(HEADS, HEAD_DIM, LATENT + len(key_dims), dtype=norm.dtype)
    value_up = torch.zeros(HEADS, HEAD_DIM, rank, dtype=norm.dtype)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        value_up[head, :, group * HEAD_DIM : (group + 1) * HEAD_DIM] = torch.eye(HEAD_DIM)
        for column, (g, dim) in enumerate(key_dims):
            query_up[head, dim, LATENT + column] = float(g == group)
    return {**tensors, "query_up": query_up, "value_up": value_up}


def lossless_config(source: PreTrainedModel, **overrides) -> SurgeryConfig:
    inv_freq = source.model.rotary_emb.inv_freq.tolist() * KV_HEADS
    rotated = [frequency for frequency in inv_freq if frequency != 0]
    eps = source.config.rms_norm_eps if source.config.model_type in WITH_KEY_NORM else None
    rank = LATENT + 2 * (len(inv_freq) - len(rotated))
    layer = {"kind": "latent", "kv_lora_rank": rank, "rope_inv_freq": rotated, "key_norm_eps": eps}
    return SurgeryConfig.from_base(source.config, [dict(layer) for _ in range(LAYERS)], **overrides)


def lossless_tensors(source: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exchange the attention's tensors in a state dict or checkpoint of the source, and touch nothing else."""
    removed = ("self_attn.v_proj.", "self_attn.k_norm.")
    if source.config.model_type not in WITH_KEY_NORM:
        removed += ("self_attn.k_proj.",)
    result = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in removed)}
    for index, layer in enumerate(source.model.layers):
        for name, tensor in latent_attention_tensors(layer.self_attn, source.model.rotary_emb.inv_freq).items():
            result[f"model.layers.{index}.self_attn.{name}"] = tensor.detach().clone()
    return result


def lossless_model(source: PreTrainedModel, **overrides) -> SurgeryForCausalLM:
    model = SurgeryForCausalLM(lossless_config(source, experts_implementation="eager", **overrides)).to(source.dtype)
    model.load_state_dict(lossless_tensors(source, source.state_dict()), strict=True)
    return model.eval()


def agree(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def decode(model: PreTrainedModel, cache: Cache, prompt: int = 5) -> torch.Tensor:
    """Logits of `tokens()`, a prompt in one piece and the rest token by token."""
    pieces = tokens().split((prompt, *[1] * (tokens().shape[1] - prompt)), dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def source(family) -> PreTrainedModel:
    return tiny_source(family)


@pytest.fixture
def model(source) -> SurgeryForCausalLM:
    return lossless_model(source)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_logits_equal_the_source(source, model, implementation):
    source.set_attn_implementation(implementation)
    model.set_attn_implementation(implementation)
    assert model.model.layers[0].self_attn.config._attn_implementation == implementation
    agree(model(tokens()).logits, source(tokens()).logits)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITH_KEY_NORM], indirect=True)
def test_logits_equal_the_source_in_double(source):
    source = source.double()
    agree(lossless_model(source)(tokens()).logits, source(tokens()).logits, 1e-9)


@pytest.mark.parametrize("unrotated", [HEAD_DIM // 4, HEAD_DIM // 2], ids=["half", "no-rope"])
@pytest.mark.parametrize("family", ["llama", "qwen3"], indirect=True)
def test_keys_in_the_latent(source, unrotated):
    source.model.rotary_emb.inv_freq[-unrotated:] = 0
    model = lossless_model(source)
    full = model(tokens()).logits
    agree(full, source(tokens()).logits)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        agree(decode(model, cache), full)
    assert model.model.layers[0].self_attn.rope_dim == 2 * KV_HEADS * (HEAD_DIM // 2 - unrotated)


@pytest.mark.parametrize("family", MOE, indirect=True)
def test_experts_run_as_in_the_source(source):
    config = lossless_config(source)
    for choice in (None, "grouped_mm", "batched_mm"):
        config._experts_implementation = choice
        model = SurgeryForCausalLM(config)
        assert model.model.config._experts_implementation == config._experts_implementation == (choice or "grouped_mm")
    model.load_state_dict(lossless_tensors(source, source.state_dict()))
    agree(model.eval()(tokens()).logits, source(tokens()).logits)
    model.set_experts_implementation("eager")
    assert model.model.config._experts_implementation == model.config._experts_implementation == "eager"


def test_copies_and_pickles(model):
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens()).logits, model(tokens()).logits)


def test_cached_equals_uncached(model):
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        agree(decode(model, cache), model(tokens(), use_cache=False).logits)


def test_cache_holds_the_latent_and_nothing_else(family, model):
    ids = tokens(batch=2, length=12)
    cache = model(ids, use_cache=True).past_key_values
    width = LATENT + LATENT + (KV_HEADS if family in WITH_KEY_NORM else 0)
    for layer in cache.layers:
        held = min(12, layer.sliding_window - 1) if layer.is_sliding else 12
        nbytes = layer.keys.numel() * layer.keys.itemsize + layer.values.numel() * layer.values.itemsize
        assert nbytes == 2 * held * width * 4
    assert any(layer.is_sliding for layer in cache.layers) == (family not in FULL_ATTENTION)


def test_left_padding_equals_unpadded(model):
    ids = tokens(batch=1, length=7)
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(11) >= 4).long()[None]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=position_ids).logits
    agree(logits[:, 4:], model(ids).logits)
    alone = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    beside = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(alone[:, 7:], beside[:, 11:])


GENERATION = {
    "greedy": {"do_sample": False},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "chunked-prefill": {"do_sample": False, "prefill_chunk_size": 4, "disable_compile": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 5},
}


@pytest.mark.parametrize("how", GENERATION.values(), ids=GENERATION.keys())
def test_generates_what_the_source_generates(source, model, how):
    def generate(any_model):
        torch.manual_seed(2)
        return any_model.generate(tokens(), attention_mask=torch.ones_like(tokens()), max_new_tokens=8, **how)

    assert torch.equal(generate(model), generate(source))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"], indirect=True)
def test_decode_step_compiles_in_one_graph(model):
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    for cache in caches:
        model(tokens(length=5), past_key_values=cache)
    step = torch.compile(model.__call__, fullgraph=True, backend="eager", dynamic=False)
    next_token = tokens(length=1)
    compiled = step(next_token, past_key_values=caches[0]).logits
    agree(compiled, model(next_token, past_key_values=caches[1]).logits)


@torch.enable_grad()
def test_trains_with_gradient_checkpointing(model):
    def gradients():
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.train()
    plain = gradients()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        agree(gradient, plain[name], 1e-4)
    assert all(plain[name].abs().sum() > 0 for name in plain if "query_up" in name or "value_up" in name)


def test_loss_hidden_states_and_attentions_are_those_of_the_source(source, model):
    wanted = {"labels": tokens(), "logits_to_keep": 0, "output_hidden_states": True, "output_attentions": True}
    source.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    theirs, ours = source(tokens(), **wanted), model(tokens(), **wanted)
    agree(ours.loss, theirs.loss)
    for a, b in zip((*ours.hidden_states, *ours.attentions), (*theirs.hidden_states, *theirs.attentions), strict=True):
        agree(a, b, 1e-4)
    assert model(tokens(), logits_to_keep=3).logits.shape == (2, 3, VOCAB)
    assert isinstance(model(tokens(), return_dict=False), tuple)


def test_saved_and_reloaded_is_bit_identical(model, tmp_path):
    model.save_pretrained(tmp_path)
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(reloaded) is SurgeryForCausalLM
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(reloaded(tokens()).logits, model(tokens()).logits)
    for name, tensor in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], tensor), name
    assert reloaded.config.attention_layers == model.config.attention_layers
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert all((tmp_path / file.name).read_text() == file.read_text() for file in remote_code_files())


def test_half_precision_keeps_the_frequencies(source, model, tmp_path):
    frequencies = torch.tensor(model.config.attention_layers[0]["rope_inv_freq"], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for half in (loaded, model.bfloat16()):
        assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
        for layer in half.model.layers:
            assert torch.equal(layer.self_attn.rotary.inv_freq, frequencies)
    exact = source(tokens()).logits
    assert (loaded(tokens()).logits.float() - exact).norm() < 0.05 * exact.norm()


def test_meta_device_and_materialisation(source):
    config = lossless_config(source)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    expected = lossless_tensors(source, source.state_dict())
    assert {name: t.shape for name, t in skeleton.state_dict().items()} == {n: t.shape for n, t in expected.items()}
    skeleton.to_empty(device="cpu")
    frequencies = torch.tensor(config.attention_layers[1]["rope_inv_freq"], dtype=torch.float32)
    assert torch.equal(skeleton.model.layers[1].self_attn.rotary.inv_freq, frequencies)


@pytest.mark.parametrize("family", MOE, indirect=True)
def test_checkpoint_with_one_tensor_per_expert_loads(source, tmp_path):
    source.save_pretrained(tmp_path / "source")
    converted = lossless_tensors(source, load_file(tmp_path / "source" / "model.safetensors"))
    assert any(".experts.3." in name for name in converted), "the checkpoint should hold per-expert tensors"
    lossless_config(source).save_pretrained(tmp_path / "target")
    save_file(converted, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    agree(model(tokens()).logits, source(tokens()).logits)
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == converted.keys()


def test_layers_may_keep_their_own_attention_and_ranks_may_differ():
    source = tiny_source("qwen3")
    config = lossless_config(source)
    config.attention_layers[0] = None
    mixed = SurgeryForCausalLM(config).eval()
    tensors = lossless_tensors(source, source.state_dict())
    first = {name: tensor for name, tensor in source.state_dict().items() if ".layers.0." in name}
    mixed.load_state_dict({k: v for k, v in tensors.items() if ".layers.0." not in k} | first, strict=True)
    agree(mixed(tokens()).logits, source(tokens()).logits)
    agree(decode(mixed, DynamicCache(config=config)), source(tokens()).logits)

    config.attention_layers = [
        {"kind": "latent", "kv_lora_rank": 3, "rope_inv_freq": [], "key_norm_eps": None},
        {"kind": "latent", "kv_lora_rank": 7, "rope_inv_freq": [1.0, 0.3], "key_norm_eps": 1e-6},
    ]
    uneven = SurgeryForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    agree(decode(uneven, cache), uneven(tokens()).logits)
    assert [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in cache.layers] == [(3, 0), (7, 4 + KV_HEADS)]


def test_config_speaks_for_the_source_and_survives_the_file(source, tmp_path):
    frequencies = [1.0, 1 / 3, 0.1, 1e-300]
    layers = [{"kind": "latent", "kv_lora_rank": 5, "rope_inv_freq": frequencies, "key_norm_eps": None}] * LAYERS
    config = SurgeryConfig.from_base(source.config, layers, auto_map=AUTO_MAP)
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
    "gemma2": {"base_model_type": "gemma2", "attention_layers": [LAYER]},
    "entries for 3 layers": {"num_hidden_layers": 3, "attention_layers": [LAYER] * 2},
    "at least 1": {"num_hidden_layers": 1, "attention_layers": [{**LAYER, "kv_lora_rank": 0}]},
    "has keys": {"num_hidden_layers": 1, "attention_layers": [{"kind": "latent", "kv_lora_rank": 4}]},
    "has no k_norm": {"num_hidden_layers": 1, "attention_layers": [{**LAYER, "key_norm_eps": 1e-6}]},
    "no attention_layers": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_carried_is_refused(message):
    with pytest.raises(ValueError, match=message):
        SurgeryForCausalLM(SurgeryConfig(**SHAPE | REFUSED[message]))


CHILD = """
import sys
sys.modules["surgery"] = None  # the package is installed here; its users may not have it
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    expected = load_file(folder + "/expected.safetensors")
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected["logits"]), folder
    model.generate(expected["ids"], max_new_tokens=2, do_sample=False)
    model.save_pretrained(folder + "/again")
    AutoModelForCausalLM.from_pretrained(folder + "/again", trust_remote_code=True)
"""


def test_loads_without_the_package(tmp_path):
    for family in FAMILIES:
        model = lossless_model(tiny_source(family))
        model.save_pretrained(tmp_path / family)
        save_file({"ids": tokens(), "logits": model(tokens()).logits}, tmp_path / family / "expected.safetensors")
    folders = [str(tmp_path / family) for family in FAMILIES]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    child = subprocess.run(
        [sys.executable, "-I", "-c", CHILD, *folders], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
