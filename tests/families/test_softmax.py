"""A softmax that is not the plain one is never left out: not by fused attention, kernels, or taps."""

import pytest
import torch
from tiny_models import OWN_SOFTMAX, tokens
from transformers import AutoModelForCausalLM

from surgery.acceleration.accelerate import accelerate
from surgery.engines.in_transformers import EAGER
from surgery.families import FAMILIES
from surgery.heads.attention_rows import attention_rows
from surgery.heads.streaming import mixed_output
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.running.attention_tap import AttentionCall, tap_attention
from surgery.running.loading import attention_of


def custom_class(checkpoint, **how) -> SurgeryForCausalLM:
    """The model in the custom model class, with its own attention in every layer."""
    source = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = SurgeryConfig.from_base(source.config, [None, None], **how)
    model = SurgeryForCausalLM(config).eval()
    model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize("name", OWN_SOFTMAX)
@torch.no_grad()
def test_layers_that_stay_keep_it(checkpoints, name):
    expected = AutoModelForCausalLM.from_pretrained(checkpoints(name), attn_implementation="eager").eval()(tokens())
    model = custom_class(checkpoints(name))
    assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"
    assert torch.equal(model(tokens()).logits, expected.logits)
    for fused in ("sdpa", "flex_attention"):
        with pytest.raises(ValueError, match=f'attn_implementation="{fused}"|does not support'):
            model.set_attn_implementation(fused)
        with pytest.raises(ValueError, match=f'attn_implementation="{fused}"|does not support'):
            custom_class(checkpoints(name), attn_implementation=fused)


@pytest.mark.parametrize("name", OWN_SOFTMAX)
def test_kernels_are_refused(checkpoints, name):
    for model in (custom_class(checkpoints(name)), AutoModelForCausalLM.from_pretrained(checkpoints(name))):
        assert "no kernel supports" in accelerate(model).refused


@pytest.mark.parametrize("name", OWN_SOFTMAX)
@torch.no_grad()
def test_taps_see_it(checkpoints, name):
    model = AutoModelForCausalLM.from_pretrained(checkpoints(name), **attention_of(checkpoints(name))).eval()
    expected, calls = model(tokens()).logits, []

    def attention(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.output()

    with tap_attention(model, attention):
        torch.testing.assert_close(model(tokens()).logits, expected, atol=1e-4, rtol=1e-4)
    none = torch.zeros(2, dtype=torch.bool)
    for call in calls:
        by_heads = torch.cat([call.of_heads(head, head + 1).output() for head in range(2)], dim=2)
        torch.testing.assert_close(by_heads, call.output())
        torch.testing.assert_close(mixed_output(call, ~none, 0, 40), call.output())
        rows = attention_rows(call, torch.arange(40)) @ call.value.repeat_interleave(2, dim=1)
        torch.testing.assert_close(rows.transpose(1, 2), call.output())


def test_what_has_to_be_told_is_said():
    assert sorted(EAGER) == sorted(name for name, family in FAMILIES.items() if family.eager)
