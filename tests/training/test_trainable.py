"""Gradients reach exactly what should train, and entries with factors move as far as they may."""

import pytest
import torch
from own_models import lossless_model, tiny_source, tokens

from surgery.common.errors import SurgeryError
from surgery.training.lr_multipliers import LRMultipliers, adapter_factors, factors_of
from surgery.training.settings import HealSettings
from surgery.training.trainable import add_adapters, choose_parameters

DOWN = "model.layers.0.self_attn.kv_down.weight"


@pytest.fixture
def teacher():
    with torch.no_grad():
        return tiny_source("llama").requires_grad_()


@pytest.fixture
def student(teacher):
    with torch.no_grad():
        return lossless_model(teacher).train()


def with_gradients(model) -> set[str]:
    model(input_ids=tokens(), use_cache=False).logits.square().mean().backward()
    return {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}


@pytest.mark.parametrize("train", ["all", "attention"])
def test_gradients_reach_exactly_what_trains(student, train):
    choose_parameters(student, HealSettings(train=train))
    names = {name for name, _ in student.named_parameters() if train == "all" or "self_attn" in name}
    assert {name for name, each in student.named_parameters() if each.requires_grad} == names
    assert with_gradients(student) == names


@pytest.mark.parametrize("train", ["attention", "lora"])
def test_nothing_to_train_is_refused(train):
    with pytest.raises(SurgeryError, match="no parameters to train"):
        choose_parameters(torch.nn.Linear(2, 2), HealSettings(train=train))


def test_only_adapters_train(student):
    adapted = add_adapters(student, 2, 4.0)
    assert adapted.get_base_model() is student
    names = {name for name, each in student.named_parameters() if each.requires_grad}
    modules = {name.split(".lora_")[0] for name in names}
    linear = {"q_proj", "o_proj", "kv_down"}
    assert modules == {f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in linear}
    # B is 0 at first, and so is the gradient of A.
    assert with_gradients(student) == {name for name in names if "lora_B" in name}


def steps(model, factors, count=5, clip=1.0):
    """Some steps of the loop's kind, with everything in AdamW that could move an entry."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
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
    factors = {"weight": factors_of({"weight": {"rows": factor}}, small, "test")["weight"].dense(small.weight)}
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


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_rows_and_columns_of_an_update_by_adapters(student, side):
    dim = 0 if side == "rows" else 1
    choose_parameters(student, HealSettings())
    size = student.get_parameter(DOWN).shape[dim]
    factors = factors_of({DOWN: {side: [0.0, *[1.0] * (size - 2), 0.5]}}, student, "test")
    add_adapters(student, 2, 4.0)
    translated = adapter_factors(factors, student)
    sides = "B" if side == "rows" else "AB"
    assert {name.split(".lora_")[1] for name in translated} == {f"{each}.default.weight" for each in sides}
    steps(student, translated)
    update = dict(student.named_modules())[DOWN.removesuffix(".weight")].get_delta_weight("default")
    assert update.any(dim=1 - dim).tolist() == [False, *[True] * (size - 1)]


@pytest.mark.parametrize(
    "rules", [{"kv_dwon.weight": {"rows": 0}}, {DOWN: {"rows": [0, 1]}}, {DOWN: {"columns": "0:3"}}, {DOWN: True}]
)
def test_impossible_rules_are_refused(student, rules):
    with pytest.raises(SurgeryError, match=r"rules.json: .* must be a parameter, with numbers or lists"):
        factors_of(rules, student, "rules.json")


def test_everything_frozen_is_refused(student):
    choose_parameters(student, HealSettings())
    factors = {name: torch.zeros(each.shape) for name, each in student.named_parameters()}
    with pytest.raises(SurgeryError, match="no trainable parameters: every element"):
        LRMultipliers(student.named_parameters(), factors)
