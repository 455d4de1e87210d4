"""Gradients reach exactly what should train, and entries with factors move as far as they may."""

import pytest
import torch
from own_models import lossless_model, tiny_source, tokens

from surgery.common.errors import SurgeryError
from surgery.training.lr_multipliers import LRMultipliers, adapter_factors, factors_of
from surgery.training.trainable import add_adapters, choose, parameter_groups

DOWN = "model.layers.0.self_attn.kv_down.weight"


@pytest.fixture
def teacher():
    with torch.no_grad():
        return tiny_source("llama").requires_grad_()


@pytest.fixture
def student(teacher):
    with torch.no_grad():
        return lossless_model(teacher).train()


def shapes(model) -> dict:
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def with_gradients(model) -> set[str]:
    model(input_ids=tokens(), use_cache=False).logits.square().mean().backward()
    return {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}


@pytest.mark.parametrize("train", ["all", "attention", "new"])
def test_gradients_reach_exactly_what_trains(student, teacher, train):
    selection = choose(student, train, teacher_shapes=shapes(teacher))
    names = set(shapes(student))
    expected = {
        "all": names,
        "attention": {name for name in names if "self_attn" in name},
        "new": {name for name in names if any(part in name for part in ("kv_down", "query_up", "value_up"))},
    }[train]
    assert set(selection) == expected
    assert with_gradients(student) == expected


def test_nothing_to_train_is_refused(teacher):
    with pytest.raises(SurgeryError, match="the teacher has all parameters"):
        choose(teacher, "new", teacher_shapes=shapes(teacher))
    with pytest.raises(SurgeryError, match="the model has no attention modules"):
        choose(torch.nn.Linear(2, 2), "attention")


def test_only_adapters_train(student, teacher):
    adapted = add_adapters(student, 2, 4.0)
    assert adapted.get_base_model() is student
    names = {name for name, each in student.named_parameters() if each.requires_grad}
    modules = {name.split(".lora_")[0] for name in names}
    linear = {"q_proj", "o_proj", "kv_down"}
    assert modules == {f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in linear}
    # B is 0 at first, and so is the gradient of A.
    assert with_gradients(student) == {name for name in names if "lora_B" in name}
    with pytest.raises(SurgeryError, match="no linear module matches"):
        add_adapters(teacher, 2, 4.0, ["kv_down"])


def test_adapters_on_named_modules(student):
    add_adapters(student, 2, 4.0, ["layers.0.mlp.up_proj"])
    names = [name for name, each in student.named_parameters() if each.requires_grad]
    assert {name.split(".lora_")[0] for name in names} == {"model.layers.0.mlp.up_proj"}


def steps(model, factors, count=5, weight_decay=0.1, clip=1.0):
    """Some steps of the loop's kind, with everything in AdamW that could move an entry."""
    optimizer = torch.optim.AdamW(parameter_groups(model.parameters(), weight_decay), lr=1e-2)
    entries = LRMultipliers(model.named_parameters(), factors)
    norms = []
    for _ in range(count):
        model(input_ids=tokens(), use_cache=False).logits.square().mean().backward()
        entries.before_step()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        entries.after_step()
        optimizer.zero_grad()
    return norms


def test_a_factor_trains_a_small_weight_as_if_it_were_large():
    """w = f·v: what happens to v without the factor happens to w with it."""
    factor = 2.0**-20
    torch.manual_seed(0)
    inputs, target = torch.randn(16, 4), torch.randn(16, 3)
    plain, small = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    with torch.no_grad():
        small.weight.copy_(plain.weight * factor)
        small.bias.copy_(plain.bias)
    factors = factors_of({"weight": {"rows": "0:3", "factor": factor}}, small, "test")
    norms = []
    for layer, gain, values in ((plain, 1.0, {}), (small, 1 / factor, factors)):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)
        entries = LRMultipliers(layer.named_parameters(), values)
        for _ in range(4):
            output = torch.nn.functional.linear(inputs, layer.weight * gain, layer.bias)
            (output - target).square().mean().backward()
            entries.before_step()
            norms.append(float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)))
            optimizer.step()
            entries.after_step()
            optimizer.zero_grad()
    torch.testing.assert_close(small.weight / factor, plain.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms[4:], norms[:4], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("rule", "dim", "sides"), [([0], 0, "B"), ([{"columns": [0]}, {"columns": [-1], "factor": 0.5}], 1, "AB")]
)
def test_rows_and_columns_of_an_update_by_adapters(student, rule, dim, sides):
    choose(student, "attention")
    factors = factors_of({"kv_down.weight": rule}, student, "test")
    add_adapters(student, 2, 4.0)
    translated = adapter_factors(factors, student)
    assert {name.split(".lora_")[1] for name in translated} == {f"{side}.default.weight" for side in sides}
    steps(student, translated)
    update = dict(student.named_modules())[DOWN.removesuffix(".weight")].get_delta_weight("default")
    assert update.any(dim=1 - dim).tolist() == [False, *[True] * (update.shape[dim] - 1)]
    factors[DOWN][1, 2] = 0
    with pytest.raises(SurgeryError, match="must cover whole rows or columns"):
        adapter_factors(factors, student)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"kv_dwon.weight": True}, "no parameter matches"),
        ({"kv_down.weight": [99]}, "indices must be true, a list"),
        ({"kv_down.weight": "0:99"}, "indices must be true, a list"),
        ({"kv_down.weight": False}, "indices must be true, a list"),
        ({"kv_down.weight": {"row": [0]}}, "a rule takes"),
        ({"kv_down.weight": {"rows": [0], "factor": -1}}, "a finite number >= 0"),
    ],
)
def test_impossible_rules_are_refused(student, rules, message):
    with pytest.raises(SurgeryError, match=message):
        factors_of(rules, student, "rules.json")


def test_everything_frozen_is_refused(student):
    choose(student, "attention")
    factors = factors_of({"*": True}, student, "test")
    with pytest.raises(SurgeryError, match="no trainable parameters: every element"):
        LRMultipliers(student.named_parameters(), factors)


def test_vectors_have_no_weight_decay(student):
    groups = parameter_groups(student.parameters(), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(each.ndim == 1 for each in groups[1]["params"])
