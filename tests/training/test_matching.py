"""Matching of layers' and attentions' outputs: what is recorded, in which models, and where gradients go."""

import pytest
import torch
from device_checks import on_device
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

from surgery.common.errors import SurgeryError
from surgery.training.distillation import Distillation, layer_errors, matching_loss, on_teacher_inputs
from surgery.training.recording import decoder_of, recorded
from surgery.training.settings import ObjectiveWeights
from tests.support.own_models import KINDS, LAYERS, SHAPE, tiny_source, tokens

torch.set_num_threads(1)
BATCH, LENGTH = 2, 12


make_source = torch.no_grad()(tiny_source)


@pytest.fixture(scope="module")
def source():
    return make_source("llama")


def student_of(source, kind: str = "latent"):
    """A model that computes what its source does, slightly moved."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        student = KINDS[kind](source)
        for name, parameter in student.named_parameters():
            if ".self_attn." in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return student


def errors_of(student, teacher) -> torch.Tensor:
    """Errors of layers at all positions."""
    valid = torch.ones(student[0].shape[:2], dtype=torch.bool)
    return layer_errors(student, teacher, valid, valid.numel())


def teacher_pass(source):
    with torch.no_grad(), recorded(source, hidden=True, attention=True, inputs=True) as record:
        source(tokens(BATCH, LENGTH))
    return record


def test_records_what_transformers_reports(source):
    source.config._attn_implementation, before = "eager", source.config._attn_implementation
    output = source(tokens(), output_hidden_states=True)
    source.config._attn_implementation = before
    record = teacher_pass(source)
    torch.testing.assert_close(record.hidden[0], output.hidden_states[1])
    # The last that transformers reports is after the final norm.
    torch.testing.assert_close(source.model.norm(record.hidden[-1]), output.hidden_states[-1])
    layer = source.model.layers[1]
    torch.testing.assert_close(record.inputs[1], layer.input_layernorm(record.hidden[0]))
    middle = record.hidden[0] + record.attention[1]
    torch.testing.assert_close(middle + layer.mlp(layer.post_attention_layernorm(middle)), record.hidden[1])


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_recording_holds_the_last_pass_only(source):
    hooks = hooks_of(source)
    with torch.no_grad(), recorded(source, hidden=True) as record:
        source(tokens(2, 12))
        source(tokens(1, 7))
        assert [hidden.shape for hidden in record.hidden] == [(1, 7, 32)] * LAYERS
    source(tokens(2, 5))
    assert record.hidden[0].shape == (1, 7, 32)
    assert hooks_of(source) == hooks


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_matching(source, kind):
    """They are the same with gradient checkpointing, and those of an output computed by hand."""
    teacher, results = teacher_pass(source), []
    for checkpointing in (False, True):
        student, calls = student_of(source, kind).train(), []
        if checkpointing:
            student.gradient_checkpointing_enable({"use_reentrant": False})
        student.model.layers[0].self_attn.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        with recorded(student, hidden=True, attention=True) as record:
            student(tokens(BATCH, LENGTH), use_cache=False)
            # Inside: recomputed layers must not be taken for another pass.
            attention = errors_of(record.attention, teacher.attention).mean()
            loss = errors_of(record.hidden, teacher.hidden).mean() + attention
            loss.backward()
            torch.testing.assert_close(errors_of(record.hidden, teacher.hidden).mean(), loss - attention)
        assert len(calls) == 1 + checkpointing
        results.append({name: parameter.grad for name, parameter in student.named_parameters()})
        assert results[-1].pop("lm_head.weight") is None and results[-1].pop("model.norm.weight") is None
        assert all(grad is not None and grad.isfinite().all() for grad in results[-1].values()), kind
    torch.testing.assert_close(*results)
    moved = student_of(source, kind).train()
    outputs = moved(tokens(BATCH, LENGTH), output_hidden_states=True, use_cache=False).hidden_states[1]
    expected = errors_of([outputs], teacher.hidden[:1])
    torch.testing.assert_close(errors_of(record.hidden, teacher.hidden)[0], expected[0])


def test_errors_are_relative_to_each_sequence():
    generator = torch.Generator().manual_seed(0)
    teacher = [torch.randn(3, 5, 4, generator=generator) * scale for scale in (1, 30)]
    student = [layer + 0.1 * torch.randn(layer.shape, generator=generator) for layer in teacher]
    valid = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    expected = []
    for ours, theirs in zip(student, teacher, strict=True):
        total = 0.0
        for row in range(2):
            selection = valid[row]
            error = (ours[row, selection] - theirs[row, selection]).square().mean()
            total += selection.sum() * error / theirs[row, selection].square().mean()
        expected.append(total / 7)
    torch.testing.assert_close(layer_errors(student, teacher, valid, 7), torch.stack(expected))
    torch.testing.assert_close(matching_loss(student, teacher, valid, 7), torch.stack(expected).mean())
    # Dealt out to processes, they sum to the same.
    shares = [layer_errors([s[r] for s in student], [t[r] for t in teacher], valid[r], 7) for r in ([0], [1, 2])]
    torch.testing.assert_close(shares[0] + shares[1], torch.stack(expected))


def test_errors_are_fp32():
    teacher = [torch.randn(1, 3, 4).bfloat16()]
    student = [(teacher[0] + 0.5).requires_grad_()]
    error = errors_of(student, teacher)
    assert error.dtype == torch.float32
    wide = [[states[0].detach().float()] for states in (student, teacher)]
    torch.testing.assert_close(error, errors_of(*wide), rtol=1e-6, atol=0)
    assert torch.autograd.grad(error, student)[0].dtype == torch.bfloat16


def test_what_cannot_be_matched(source):
    with pytest.raises(SurgeryError, match="Linear: layers without self_attn"):
        decoder_of(nn.Linear(2, 2))
    weights = ObjectiveWeights(kl=0.0, layerwise=1.0)
    for shape, message in (
        ({"num_hidden_layers": 3}, "numbers of layers differ: student 3, teacher 2"),
        ({"hidden_size": 64}, "hidden sizes differ: student 64, teacher 32"),
    ):
        with pytest.raises(SurgeryError, match=message):
            Distillation(make_source("llama", **shape), weights, source)


def test_a_microbatch_stays_on_its_device():
    on_device("microbatches")


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_students_have_no_error_on_teacher_inputs(source, kind):
    teacher = teacher_pass(source)
    with torch.no_grad():
        student = KINDS[kind](source)
    with on_teacher_inputs(student, teacher) as record:
        student(tokens(BATCH, LENGTH), use_cache=False)
    assert errors_of(record.attention, teacher.attention).max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_layers_train_alone(source, kind):
    """Each attention sees its teacher's input, whatever the layers before it do, and its error moves only itself."""
    teacher, student = teacher_pass(source), student_of(source, kind).train()
    with torch.no_grad():
        student.model.layers[0].mlp.down_proj.weight.mul_(3)
        student.model.embed_tokens.weight.mul_(2)
    inputs = []
    student.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with on_teacher_inputs(student, teacher) as record:
        student.model.layers[1].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
        )
        student(tokens(BATCH, LENGTH), use_cache=False)
    assert not torch.equal(*inputs)
    assert torch.equal(inputs[1], teacher.inputs[1])
    assert (errors_of(record.attention, teacher.attention) > 1e-4).all()
    errors_of(record.attention[1:], teacher.attention[1:]).mean().backward()
    moved = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    # Only attentions that hand their latents on to later layers are reached by their errors.
    layers = ("0", "1") if kind == "shared" else ("1",)
    assert moved == {
        name for name, _ in student.named_parameters() if any(f"layers.{n}.self_attn." in name for n in layers)
    } - _not_reached(kind)


def _not_reached(kind: str) -> set[str]:
    """Return the parameters that no gradient reaches: of the first layer in a shared cascade, the second reads its
    latents alone."""
    if kind != "shared":
        return set()
    names = ("q_proj.weight", "q_proj.bias", "o_proj.weight", "o_proj.bias", "key_up.0", "value_up.0")
    return {f"model.layers.0.self_attn.{name}" for name in (*names, "key_bias", "value_bias")}


def test_the_student_goes_on_with_the_teachers_output(source):
    teacher, student = teacher_pass(source), student_of(source)
    with on_teacher_inputs(student, teacher), recorded(student, hidden=True) as record:
        student(tokens(BATCH, LENGTH), use_cache=False)
    torch.testing.assert_close(record.hidden, teacher.hidden)


def test_stock_students_of_another_class(source):
    """An MLA student with its own rotary embedding: the teacher's would not fit its keys."""
    shape = {**SHAPE, "num_key_value_heads": SHAPE["num_attention_heads"], "intermediate_size": 48}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": None}
    config = DeepseekV3Config(**shape, **heads, first_k_dense_replace=LAYERS)
    torch.manual_seed(1)
    student, teacher = AutoModelForCausalLM.from_config(config), teacher_pass(source)
    optimizer = torch.optim.Adam([p for layer in student.model.layers for p in layer.self_attn.parameters()], lr=1e-2)
    losses = []
    for _ in range(20):
        with on_teacher_inputs(student, teacher) as record:
            student(tokens(BATCH, LENGTH), use_cache=False)
        loss = errors_of(record.attention, teacher.attention).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_decoders_that_run_in_pieces(source):
    class Pieces(nn.Module):
        """Runs its layers twice, on the first tokens and on the rest."""

        def __init__(self, decoder):
            super().__init__()
            self.decoder, self.layers = decoder, decoder.layers

        def forward(self, tokens):
            for piece in (tokens[:, :8], tokens[:, 8:]):
                self.decoder(piece)

    student = Pieces(source.model)
    with torch.no_grad(), recorded(student, attention=True, inputs=True) as record:
        student(tokens())
    assert record.attention[1].shape == (2, 12, 32)
    with torch.no_grad(), recorded(source, attention=True) as first:
        source(tokens()[:, :8])
    torch.testing.assert_close(record.attention[1][:, :8], first.attention[1])
    calls = []
    with torch.no_grad(), on_teacher_inputs(student, record) as own:
        student.layers[1].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(kwargs["hidden_states"]), with_kwargs=True
        )
        student(tokens())
    assert torch.equal(torch.cat(calls, dim=1), record.inputs[1])
    torch.testing.assert_close(own.attention, record.attention)
    student.layers[1].self_attn._forward_pre_hooks.clear()
    student.layers[1].self_attn._forward_pre_hooks_with_kwargs.clear()
