"""Models on the project's kernels: the same logits through every kind of cache, in Triton's interpreter."""

import copy

import pytest
import torch
from kernel_checks import only_kernels
from own_models import (
    KINDS,
    KV_HEADS,
    VOCAB,
    agree,
    decode,
    lossless_low_rank,
    lossless_model,
    tiny_source,
    tokens,
)
from tiny_models import CONFIGS, random_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, StaticCache
from written_models import WRITTEN

from surgery import registration
from surgery.acceleration import accelerate, decelerate
from surgery.acceleration.accelerate import STATE
from surgery.kernels import backend, cpu
from surgery.kernels.plan import Plan
from surgery.model import SurgeryConfig, SurgeryForCausalLM

pytestmark = pytest.mark.usefixtures("no_gradients")
SLOW = pytest.mark.slow
# Of 12 tokens: windows move in every step after it, and a group of codes is closed.
PROMPT = 8

OPERATIONS = {
    "latent": "mla_decode",
    "low_rank": "lowrank_decode",
    "blocks": "lowrank_decode",
}

DEEPSEEK = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def calls(monkeypatch):
    """Count how often each operator ran as a kernel: a fallback to its reference would pass every comparison."""
    counted = {}

    run = Plan.__call__

    def counting(plan, values, extents):
        for _, starter in plan.steps:
            name = starter.launch.kernel.fn.__name__
            counted[name] = counted.get(name, 0) + 1
        return run(plan, values, extents)

    monkeypatch.setattr(Plan, "__call__", counting)
    with only_kernels():
        yield counted


def deepseek(**overrides):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**DEEPSEEK | overrides)).eval()


def grouped(source, **overrides):
    """The source in the custom model class, with plain heads."""
    entries = [{"kind": "grouped", "kv_heads": KV_HEADS}, None]
    model = SurgeryForCausalLM(SurgeryConfig.from_base(source.config, entries, **overrides))
    model.load_state_dict(source.state_dict(), strict=True)
    return model.eval()


def check(model, calls, *, caches=("dynamic", "static"), compare=False):
    """Prompt and steps, padded rows, generation: as before, with kernels; `accelerate` may compare on its own too."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    before = {}
    for round in ("before", "after"):
        if round == "after":
            result = accelerate(model, compare=compare)
            assert result.refused is None and (result.error is not None) is compare, result.refused
            assert not compare or result.error < 1e-4
            calls.clear()
        results = []
        if "dynamic" in caches:
            results.append(decode(model, DynamicCache(config=model.config), PROMPT))
        if "static" in caches:
            results.append(decode(model, StaticCache(config=model.config, max_cache_len=16), PROMPT))
        results.append(model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None))
        before.setdefault("found", results)
    for one, other in zip(results, before["found"], strict=True):
        agree(one, other, 1e-4)
    assert calls
    return result


@pytest.mark.parametrize("kind", [kind if kind == "latent" else pytest.param(kind, marks=SLOW) for kind in OPERATIONS])
def test_every_kind(kind, calls):
    model = KINDS[kind](tiny_source("llama"))
    result = check(model, calls, caches=("dynamic", "static") if kind == "latent" else ("dynamic",), compare=True)
    assert result.layers[0] == OPERATIONS[kind]
    decelerate(model)
    assert not hasattr(model, STATE) and getattr(model.model.layers[0].self_attn, "kernel", None) is None


IN_TRITON = dict.fromkeys(("rows_latent_key_norm", "rows_latent_predicted"), "mla_decode_packed")
IN_TRITON |= dict.fromkeys(("rows_shared", "rows_head_pairs"), "lowrank_decode")


@pytest.mark.parametrize("name", IN_TRITON)
def test_rows_in_bits(name, calls):
    """Tokens that kernels pack are those that the model packs: the caches' bytes agree."""
    model, twin = WRITTEN[name](), WRITTEN[name]()
    assert set(accelerate(model, compare=False).layers) == {IN_TRITON[name]}
    caches = [DynamicCache(config=each.config) for each in (model, twin)]
    agree(*(decode(each, cache, 10) for each, cache in zip((model, twin), caches, strict=True)), 1e-4)
    attention = IN_TRITON[name].removesuffix("_packed")
    assert {"unpack_rows_kernel", f"{attention}_kernel", "pack_rows_kernel"} <= set(calls)
    assert all(map(torch.equal, *([layer.keys for layer in cache.layers] for cache in caches)))


ON_A_CPU = dict.fromkeys(("rows_latent_key_norm", "rows_latent_predicted"), "mla_decode_packed")
ON_A_CPU |= dict.fromkeys(("rows_shared", "rows_heads", "rows_head_pairs"), "lowrank_decode_packed")


@pytest.mark.parametrize("name", ON_A_CPU)
def test_rows_in_bits_on_a_cpu(name, monkeypatch):
    """C++ kernels: the same logits, padded rows included, and the same bytes in the cache."""
    if cpu.load() is not None:
        pytest.skip(cpu.load())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, twin = WRITTEN[name](), WRITTEN[name]()
    result = accelerate(model)
    assert result.refused is None and result.error < 1e-5 and set(result.layers) == {ON_A_CPU[name]}
    caches = [DynamicCache(config=each.config) for each in (model, twin)]
    used = []
    for layer in model.model.layers:
        kernel = layer.self_attn.kernel
        layer.self_attn.kernel = lambda *args, run=kernel: used.append(run(*args)) or used[-1]
    with only_kernels():
        agree(*(decode(each, cache, 10) for each, cache in zip((model, twin), caches, strict=True)), 1e-4)
    assert all(map(torch.equal, *([layer.keys for layer in cache.layers] for cache in caches)))
    assert sum(out is not None for out in used) >= 2 * len(model.model.layers)  # the prompt may keep PyTorch's code


def test_a_cpu_without_kernels(monkeypatch):
    """No kernel for latents in full precision, or no compiler: PyTorch's code stays, with the reason."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "only layers in bits" in accelerate(KINDS["low_rank"](tiny_source("llama"))).refused
    monkeypatch.setattr(cpu, "load", lambda: "no compiler")
    assert accelerate(WRITTEN["rows_latent"]()).refused == "no compiler"


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(family, marks=SLOW) for family in ("llama", "mixtral"))])
def test_every_family(family, calls):
    check(lossless_model(tiny_source(family)), calls, caches=("dynamic",))


@pytest.mark.parametrize(
    "overrides",
    [
        {"q_lora_rank": 16, "attention_bias": True},
        *(pytest.param(less, marks=SLOW) for less in ({}, {"num_attention_heads": 8})),
    ],
)
def test_stock_mla_reads_its_latents(overrides, calls):
    if "num_attention_heads" in overrides:
        overrides = overrides | {"num_key_value_heads": 8}
    result = check(deepseek(**overrides), calls)
    assert set(result.layers) == {"mla_decode"}


@pytest.mark.parametrize("make", [tiny_source, lambda family: grouped(tiny_source(family))], ids=["stock", "grouped"])
def test_plain_heads_stay_on_pytorchs_attention(make):
    model = make("llama")
    before = model.config._attn_implementation
    with only_kernels():
        result = accelerate(model)
    assert "plain heads" in result.refused and not result.layers
    assert model.config._attn_implementation == before and not hasattr(model, STATE)


def test_nothing_is_left():
    model = lossless_model(tiny_source("llama"))
    names = set(model.state_dict())
    expected = model(tokens()).logits
    accelerate(model)
    assert set(model.state_dict()) == names
    twin = copy.deepcopy(model)
    decelerate(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(tokens()).logits, expected)
    agree(twin(tokens()).logits, expected)


def test_a_model_whose_logits_change_keeps_its_own(monkeypatch, caplog):
    from surgery.acceleration import latent

    model = lossless_model(tiny_source("llama"))
    monkeypatch.setattr(latent, "mla_decode", lambda query, latent, *_, **__: (query[..., : latent.shape[-1]], None))
    result = accelerate(model)
    assert result.refused and "logits differ" in result.refused and "is not accelerated" in caplog.text
    assert not hasattr(model, STATE) and getattr(model.model.layers[0].self_attn, "kernel", None) is None


def test_where_kernels_cannot_run_it_says_so(monkeypatch, caplog):
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    if torch.cuda.is_available():
        pytest.skip("kernels run here")
    for family in ("llama", "gemma2"):  # the machine comes first, whatever the model's attention
        caplog.clear()
        result = accelerate(random_model(CONFIGS[family]()))
        assert "cpu" in result.refused and "cpu" in caplog.text


def test_gradients_take_the_old_way(calls):
    model = deepseek()
    accelerate(model, compare=False)
    with torch.enable_grad():
        model(tokens(), labels=tokens()).loss.backward()
    assert not [name for name in calls if "decode" in name]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_own_models_take_kernels_by_themselves_once(monkeypatch):
    requests = []
    model = lossless_model(tiny_source("llama"))
    monkeypatch.setattr(type(model), "on_device", staticmethod(requests.append))
    model(tokens())
    assert not requests  # it is on the CPU
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    model(tokens())
    model(tokens())
    assert requests == [model]


@pytest.mark.parametrize("make", [lossless_model, lossless_low_rank], ids=["latent", "low_rank"])
def test_grouped_codes_are_dequantized_for_kernels(make, calls):
    """Checkpoints of earlier versions cache groups of tokens in int8: kernels read what their cache gives back."""
    codes = {"format": "int8", "keys": "channel", "group": 4, "window": 2}
    check(make(tiny_source("llama"), kv_cache=codes), calls, caches=("dynamic",))


NORM = "not accelerated: the key norm is not an RMSNorm per head"


@pytest.mark.parametrize(
    ("family", "latent", "low_rank"),
    [
        ("granite", "mla_decode", "lowrank_decode"),
        ("glm4", "mla_decode", "not accelerated: RoPE does not rotate whole heads in half-split pairs"),
        ("olmo2", "not accelerated: the key norm spans all heads", NORM),
        ("gemma3_window", "mla_decode", NORM),
    ],
)
def test_kernels_read_the_layers_that_they_know(family, latent, low_rank):
    """The first layer is of the one kind, the second of the other; what kernels read is compared by `accelerate`."""
    source = CONFIGS[family]()
    eps = source.rms_norm_eps if family in ("olmo2", "gemma3_window") else None
    heads = {"rank": 8, "keys": [0, 1], "values": [0, 1]}
    entries = [
        {"kind": "latent", "kv_lora_rank": 8, "rope_inv_freq": [1.0, 0.1], "key_norm_eps": eps},
        {"kind": "low_rank", "blocks": [heads], "shared_layers": 0, "shared_rank": 0, "sinks": 0, "window": 0},
    ]
    model = random_model(SurgeryConfig.from_base(source, entries)).eval()
    result = accelerate(model)
    assert (result.layers, result.refused) == ((latent, low_rank), None)


@pytest.mark.parametrize(("implementation", "accelerated"), [("sdpa", True), ("eager", False)])
def test_attention_that_a_user_chose_is_left(implementation, accelerated, monkeypatch):
    """QwenLM/Qwen3-VL#1682: the `attn_implementation` that a user asks for is the one that runs."""
    calls = []
    monkeypatch.setattr("surgery.acceleration.accelerate", calls.append)
    model = lossless_model(tiny_source("llama"))
    model.set_attn_implementation(implementation)
    registration._accelerate(model)
    assert bool(calls) is accelerated
