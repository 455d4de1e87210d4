"""Training through codes: what attention reads is what evaluation reads, and gradients pass the codes as if exact."""

import copy
from pathlib import Path

import pytest
import torch
from healing import heal_here, heal_settings, losses_of
from own_models import KINDS, LAYERS, agree, hybrid_entry, hybrid_model, lossless_low_rank, low_rank_entry, tiny_source
from own_models import tokens as random_tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache

from surgery.common.errors import SurgeryError
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.model.hybrid_cache import StreamingLayer
from surgery.model.left_padding import LeftPadding
from surgery.model.plain_cache import PlainLayer
from surgery.model.straight_through import StraightThroughCodes
from surgery.model.token_codes import TokenCodes
from surgery.training.data import Batch
from surgery.training.distillation import Distillation
from surgery.training.objectives import ObjectiveWeights

INT2 = {"format": "int2", "group": 4, "window": 3, "keys": "channel"}
"""Of 22 tokens 16 are codes, 6 exact."""


def tokens(length=22):
    return random_tokens(2, length)


def quantized(model: SurgeryForCausalLM, **changes) -> SurgeryForCausalLM:
    """Return the same weights with a quantized cache, in evaluation mode."""
    config = copy.deepcopy(model.config)
    config.kv_cache = INT2 | changes
    with_codes = SurgeryForCausalLM(config)
    with_codes.load_state_dict(model.state_dict())
    return with_codes.eval()


def streams(source) -> SurgeryForCausalLM:
    """All sorts of heads, with windows that forget."""
    entries = [hybrid_entry(1, [1, 0], 1, sinks=2, recent=5), hybrid_entry(0, [0, 1], sinks=1, recent=4)]
    return hybrid_model(source, entries)


def window(source) -> SurgeryForCausalLM:
    return lossless_low_rank(source, [low_rank_entry(window=3, sinks=2)] * LAYERS)


MODELS = {kind: torch.no_grad()(make) for kind, make in (KINDS | {"streams": streams, "window": window}).items()}
models = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture(scope="module")
def source():
    with torch.no_grad():
        return tiny_source("llama")


@models
def test_training_reads_what_evaluation_reads(source, kind):
    exact, ids = MODELS[kind](source), tokens()
    others = ({"format": "int4", "keys": "token"}, {"format": "int8"}) if kind == "low_rank" else ()
    for changes in ({}, {"format": "fp8", "window": 0}, *others):
        model = quantized(exact, **changes)
        for call in ({"use_cache": False}, {"use_cache": True}):
            model.quantization_aware = True
            read = model.eval()(ids, **call).logits
            assert torch.equal(model.train()(ids, **call).logits, read)
            model.quantization_aware = False
            unread = model(ids, **call).logits
            assert torch.equal(unread, exact.train()(ids, **call).logits)
            assert not torch.equal(unread, read)


@pytest.mark.parametrize("kind", ["grouped", "latent", "low_rank", "streams", "window"])
def test_a_text_may_come_in_pieces(source, kind):
    model, ids = quantized(MODELS[kind](source)), tokens()
    model.quantization_aware = True
    logits = []
    for mode in (False, True):
        model.train(mode)
        cache = None
        for piece in ids.split((9, 1, 1, 11), dim=1):
            output = model(piece, past_key_values=cache)
            cache = output.past_key_values
        logits.append(output.logits)
    assert torch.equal(*logits)


def test_mixed_dtypes_are_read_as_in_evaluation(source):
    model = quantized(MODELS["grouped"](source))
    model.quantization_aware = True
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.train()(tokens()).logits, model.eval()(tokens()).logits)


class Plugged(PlainLayer):
    """Hands out the numbers of a layer of codes as leaves of their own, with nothing between them and their past."""

    def __init__(self, codes):
        super().__init__()
        self.codes = codes

    def update(self, keys, values, *args, **kwargs):
        self.exact = keys, values
        self.read = [part.clone().requires_grad_() for part in self.codes.update(keys.detach(), values.detach())]
        return self.read


@pytest.mark.parametrize("kind", ["grouped", "latent", "low_rank", "blocks", "shared"])
def test_gradients_are_those_of_what_was_read(source, kind):
    """The exact model on plugged-in numbers; then, from the last layer on, their gradients are the exact numbers'."""
    exact, ids = MODELS[kind](source), tokens()
    model = quantized(exact)
    model.quantization_aware = True
    model.train()(ids, labels=ids, use_cache=False).loss.backward()

    layers = [Plugged(model.config.quantized_layer()) for _ in range(LAYERS)]
    exact.train()(ids, labels=ids, past_key_values=Cache(layers=layers)).loss.backward(retain_graph=True)
    for layer in reversed(layers):
        parts = [(part, read.grad) for part, read in zip(layer.exact, layer.read, strict=True) if part.shape[-1]]
        torch.autograd.backward(*zip(*parts, strict=True), retain_graph=True)
    expected = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        agree(parameter.grad, expected[name].grad)
    for name in [name for name in expected if any(part in name for part in ("k_proj", "v_proj", "kv_down"))]:
        if name.endswith("weight"):
            assert expected[name].grad.abs().max() > 1e-4, name


@pytest.mark.parametrize("form", ["int8", "int4", "int2", "fp8"])
def test_streaming_tokens_pass_their_gradients(form):
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2, 2, 3, 24, 7, generator=generator, dtype=torch.float64)
    codes = TokenCodes(form, 4)
    read, gradients = [], []
    for entry in (codes, StraightThroughCodes(codes), None):
        keys, values = exact.clone().requires_grad_()
        layer = StreamingLayer(2, 5, codes=entry)
        layer.padding = LeftPadding([0, 3])
        pieces = [part for cut in (9, 1, 14) for part in layer.update(*(t[:, :, :cut] for t in (keys, values)))]
        read.append(pieces)
        if entry is not codes:
            weighed = [(part * torch.arange(part.numel()).view(part.shape)).sum() for part in pieces]
            gradients.append(torch.autograd.grad(sum(weighed), (keys, values)))
    for one, two, other in zip(*read, strict=True):
        assert torch.equal(one, two) and not torch.equal(two, other)
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two)


@models
def test_gradient_checkpointing_reads_the_same(source, kind):
    model, ids = quantized(MODELS[kind](source)).train(), tokens()
    mask = (torch.arange(22) >= torch.tensor([0, 5])[:, None]).long()
    model.quantization_aware = True

    def gradients():
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        loss.backward()
        return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    loss, plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    other, checkpointed = gradients()
    assert torch.equal(loss, other)
    for name, gradient in checkpointed.items():
        agree(gradient, plain[name], 1e-6)


def test_without_codes_there_is_nothing_to_be_aware_of(source):
    model = MODELS["hybrid"](source)
    model.quantization_aware = True
    assert not model.quantization_aware


@pytest.fixture(scope="module")
def student(tmp_path_factory, teacher) -> Path:
    """The teacher with a cache of two bits."""
    folder = tmp_path_factory.mktemp("student")
    base = AutoConfig.from_pretrained(teacher)
    model = SurgeryForCausalLM(
        SurgeryConfig.from_base(base, [None] * base.num_hidden_layers, kv_cache=INT2 | {"window": 0})
    )
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(teacher).state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)
    return folder


@torch.no_grad()
def kl_through_the_cache(teacher, student, ids: torch.Tensor) -> float:
    """Return the KL divergence in nats a token, of a student that decodes rows token by token."""
    cache, logits = None, []
    for token in ids.split(1, dim=1):
        output = student.eval()(token, past_key_values=cache)
        cache = output.past_key_values
        logits.append(output.logits)
    own, expected = (each.log_softmax(-1).flatten(0, 1) for each in (torch.cat(logits, dim=1), teacher(ids).logits))
    return float(torch.nn.functional.kl_div(own, expected, log_target=True, reduction="batchmean"))


def test_training_lowers_the_loss_through_the_cache(teacher, student):
    teacher, student = (AutoModelForCausalLM.from_pretrained(folder) for folder in (teacher, student))
    ids = torch.randint(3, 4096, (8, 32), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, ids, torch.zeros_like(ids))
    module = Distillation(student, ObjectiveWeights(), teacher)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4, weight_decay=0.0)
    before = kl_through_the_cache(teacher, student, ids)
    for aware in (False, True):
        student.quantization_aware = aware
        for _ in range(10):
            loss, _ = module.train()(batch, batch.predicted)
            if not aware:
                assert loss < 1e-6, "read exactly the student is its teacher: there is nothing to learn"
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kl_through_the_cache(teacher, student, ids) < 0.8 * before


def test_the_setting_reaches_the_student_and_stays_in_a_resumed_run(tmp_path, teacher, student):
    runs = {
        aware: heal_settings(
            tmp_path, student, teacher, name=str(aware), quantization_aware=aware, max_steps=1, held_out=0
        )
        for aware in (True, False)
    }
    for aware, values in runs.items():
        assert heal_here(values)["quantization_aware"] is aware
    assert losses_of(runs[False])[0] < 1e-6 < losses_of(runs[True])[0]
    with pytest.raises(SurgeryError, match="quantization_aware True, not False"):
        heal_here(runs[True] | {"quantization_aware": False, "max_steps": 2, "overwrite": True})


def test_students_without_codes_cannot_be_aware(tmp_path, teacher):
    """The setting does nothing to them, and the record says so."""
    values = heal_settings(tmp_path, teacher, teacher, quantization_aware=True, max_steps=1, held_out=0)
    assert heal_here(values)["quantization_aware"] is False
