"""The attention function of training: the model's own numbers and gradients, on PyTorch's fused kernel."""

import pytest
import torch
from own_models import VOCAB, tiny_source, tokens
from tiny_models import LATENT
from transformers import AutoModelForCausalLM, DeepseekV3Config

from surgery.training.models import use_attention

CPU = torch.device("cpu")


def mla():
    torch.manual_seed(0)
    shape = {**LATENT, "vocab_size": VOCAB, "q_lora_rank": None, "first_k_dense_replace": 3}
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**shape))


def loss_and_gradients(model, **call):
    model.zero_grad()
    loss = model(tokens(), labels=tokens(), use_cache=False, **call).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(2, -1)


MADE = {"mla": mla, "llama": lambda: tiny_source("llama"), "mistral": lambda: tiny_source("mistral")}
CASES = [(make, call) for make in MADE.values() for call in ({}, {"position_ids": PACKED})]


@pytest.mark.parametrize(("make", "call"), CASES)
def test_losses_and_gradients_are_the_models_own(make, call):
    with torch.no_grad():
        model = make()
    model.train()
    expected = loss_and_gradients(model, **call)
    assert use_attention(model, CPU) == model.config._attn_implementation
    for result, target in zip(loss_and_gradients(model, **call), expected, strict=True):
        torch.testing.assert_close(result, target, atol=2e-5, rtol=1e-3)


def test_no_weights_are_held():
    """PyTorch's fused kernel runs, and not the one that computes all weights."""
    model = mla()
    for fused in (False, True):
        assert not fused or use_attention(model, CPU)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss_and_gradients(model)
        names = {event.key for event in profile.key_averages()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) == fused


def test_what_is_left_alone():
    model = mla()
    assert not use_attention(model, torch.device("cuda"))
    model.set_attn_implementation("eager")
    assert not use_attention(model, CPU)
