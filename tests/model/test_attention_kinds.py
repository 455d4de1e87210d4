"""Kinds of attention of the custom model class, in every family: each is a model like any other.

Gradients with checkpointing, adapters and offloaded weights: `tests/matrix/test_loading.py`.
"""

import copy
import functools
import pickle

import pytest
import torch
from own_models import FAMILIES, KINDS, OWN_CACHE, VOCAB, agree, decode, tiny_source, tokens
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from surgery.model import SurgeryForCausalLM

SLOW = pytest.mark.slow
BOTH, WINDOWS = ("llama", "qwen3"), ("mistral", "qwen2")


def refused(family: str, kind: str) -> bool:
    """Caches of another form, where the family has windows of its own; one cache for layers of different windows."""
    return (family in WINDOWS and kind in OWN_CACHE) or (family, kind) == ("qwen2", "shared")


PAIRS = [(family, kind) for kind in KINDS for family in FAMILIES if not refused(family, kind)]
# Biases and norms with every kind; windows and experts, which are nothing to the attention itself, with some.
CACHED = [(family, kind) for family, kind in PAIRS if family in BOTH or kind in ("latent", "low_rank", "grouped")]
# Every kind, and every family.
FEW = [(family, kind) for family, kind in CACHED if family == "qwen3" or kind == "latent"]


def on(selection: list[tuple[str, str]]):
    """A test on pairs of a family and a kind."""
    return pytest.mark.parametrize(("family", "kind"), selection, indirect=True)


@pytest.fixture
def family(request) -> str:
    return request.param


@pytest.fixture
def kind(request) -> str:
    return request.param


@functools.cache
def cached_model(family: str, kind: str) -> SurgeryForCausalLM:
    return KINDS[kind](tiny_source(family))


@pytest.fixture
def model(family, kind) -> SurgeryForCausalLM:
    return copy.deepcopy(cached_model(family, kind))


@on(PAIRS)
def test_logits_equal_the_source(source, model):
    """Compare by sdpa, and by eager attention where its weights are compared."""
    assert model.model.layers[0].self_attn.config._attn_implementation == "sdpa"
    agree(model(tokens()).logits, source(tokens()).logits)


@on(CACHED)
def test_cached_equals_uncached(kind, model):
    caches = [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)]
    for cache in caches[: 1 if kind in OWN_CACHE else 2]:
        agree(decode(model, cache, prompt=8), model(tokens(), use_cache=False).logits)


@on(FEW)
def test_left_padding_equals_unpadded(model):
    ids = tokens(batch=1, length=7)
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(11) >= 4).long()[None]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=position_ids).logits
    agree(logits[:, 4:], model(ids).logits)
    alone = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    batched = model.generate(padded, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(alone[:, 7:], batched[:, 11:])


GENERATION = {
    "greedy": {"do_sample": False},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "chunked-prefill": {"do_sample": False, "prefill_chunk_size": 4, "disable_compile": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 5},
}


# Sampling differs from greedy search in nothing that attention sees; chunks and static caches meet windows of a family.
GENERATED = [
    pytest.param(family, kind, how, id=f"{family}-{kind}-{name}")
    for family, kind in FEW
    for name, how in GENERATION.items()
    if (family, kind) == ("qwen3", "latent")
    or (name != "sampling" and (family in ("qwen3", *WINDOWS) or name in ("greedy", "beams")))
]


@pytest.mark.parametrize(("family", "kind", "how"), GENERATED, indirect=["family", "kind"])
def test_generates_what_the_source_generates(source, kind, model, how):
    if kind in OWN_CACHE and "cache_implementation" in how:
        with pytest.raises(ValueError, match="cannot continue"):
            model.generate(tokens(), max_new_tokens=8, **how)
        return

    def generate(any_model):
        torch.manual_seed(2)
        return any_model.generate(tokens(), attention_mask=torch.ones_like(tokens()), max_new_tokens=5, **how)

    assert torch.equal(generate(model), generate(source))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param("qwen3", kind, marks=[SLOW] * (kind not in ("latent", "low_rank")))
        for kind in KINDS
        if kind not in OWN_CACHE
    ],
    indirect=True,
)
def test_decode_step_compiles_in_one_graph(model):
    torch._dynamo.reset()  # every model of this test is a new specialization of the same code
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    for cache in caches:
        model(tokens(length=5), past_key_values=cache)
    step = torch.compile(model.__call__, fullgraph=True, backend="eager", dynamic=False)
    next_token = tokens(length=1)
    compiled = step(next_token, past_key_values=caches[0]).logits
    agree(compiled, model(next_token, past_key_values=caches[1]).logits)


@on(FEW)
def test_loss_hidden_states_and_attentions_are_those_of_the_source(source, kind, model):
    expected = {"labels": tokens(), "logits_to_keep": 0, "output_hidden_states": True, "output_attentions": True}
    source.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    theirs, outputs = source(tokens(), **expected), ("hidden_states", "attentions")
    if kind in OWN_CACHE and kind != "window":
        with pytest.raises(ValueError, match="have no weights over all tokens"):
            model(tokens(), **expected)
        expected["output_attentions"], outputs = False, outputs[:1]
    ours = model(tokens(), **expected)
    agree(ours.loss, theirs.loss)
    for name in outputs:
        for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            agree(a, b, 1e-4)
    assert model(tokens(), logits_to_keep=3).logits.shape == (2, 3, VOCAB)
    assert isinstance(model(tokens(), return_dict=False), tuple)


@on(FEW)
def test_copies_and_saved_models_are_bit_identical(model, tmp_path):
    model.save_pretrained(tmp_path)
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(reloaded) is type(model) and isinstance(reloaded, SurgeryForCausalLM)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = model(tokens()).logits
    for twin in (reloaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens()).logits, expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], tensor), name
    assert reloaded.config.attention_layers == model.config.attention_layers


@on(FEW)
def test_meta_device_and_materialization(model):
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in skeleton.state_dict().items()} == expected
    skeleton.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        if "rotary.inv_freq" in name:
            assert torch.equal(skeleton.get_buffer(name), buffer), name
