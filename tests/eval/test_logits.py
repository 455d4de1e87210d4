import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from measures import mean_loss
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GraniteConfig, LlamaConfig, LlamaForCausalLM

import surgery
from surgery.eval.logits import LogitReader, evaluation_mode
from surgery.eval.sequences import random_windows, tokenize
from surgery.eval.tasks import loss

ASSETS = Path(surgery.__file__).parent / "assets"
TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def tokens(count: int = 5, length: int = 21) -> torch.Tensor:
    return torch.randint(97, (count, length), generator=torch.Generator().manual_seed(0))


def tiny_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).to(dtype).eval()


@torch.no_grad()
def reference_loss(model: nn.Module, batch: torch.Tensor) -> float:
    return model(input_ids=batch, labels=batch).loss.item()


@pytest.mark.parametrize(("batch_size", "dtype"), [(1, torch.float32), (2, torch.float32), (8, torch.bfloat16)])
def test_equals_the_loss_of_transformers_in_fp32(batch_size, dtype):
    model, batch = tiny_llama(dtype), tokens()
    assert mean_loss(model, batch, batch_size) == pytest.approx(reference_loss(model, batch), abs=1e-5)


@pytest.mark.parametrize(
    "config", [Gemma2Config(**TINY, final_logit_softcapping=0.5), GraniteConfig(**TINY, logits_scaling=4.0)]
)
def test_what_a_model_does_after_its_head_is_kept(config):
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(config).eval(), tokens()
    assert not LogitReader(model, batch).splits
    assert mean_loss(model, batch) == pytest.approx(reference_loss(model, batch), abs=1e-5)


def test_the_head_never_sees_more_positions_than_allowed(monkeypatch):
    monkeypatch.setattr(loss, "ROWS_AT_ONCE", 6)
    model, batch = tiny_llama(), tokens()
    expected, records = reference_loss(model, batch), []
    assert LogitReader(model, batch).splits
    hook = model.lm_head.register_forward_pre_hook(lambda _module, args: records.append(args[0].shape[:2].numel()))
    assert mean_loss(model, batch, batch_size=2) == pytest.approx(expected, abs=1e-5)
    hook.remove()
    assert max(records[2:]) <= 6  # the first two calls try the split on 8 positions


class Uniform(nn.Module):
    """A model that knows nothing, without body, head or parameters."""

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 50))


def test_a_model_that_knows_nothing_loses_the_log_of_its_vocabulary():
    assert mean_loss(Uniform(), tokens() % 50) == pytest.approx(math.log(50), abs=1e-6)


def test_training_modes_come_back_as_they_were():
    model = tiny_llama().train()
    model.model.layers[0].eval()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert model.training and model.model.layers[1].training and not model.model.layers[0].training


@pytest.mark.slow
def test_the_demo_model_has_its_published_loss():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "demo-model")
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "demo-model", dtype=torch.float32)
    text = tokenize(tokenizer, (ASSETS / "heldout-stdlib.txt").read_text(encoding="utf-8"))
    assert mean_loss(model, random_windows(text, 24, 1024, seed=2, bos=1)) == pytest.approx(2.2785, abs=5e-5)
