"""Latents rescaled: the same function bit for bit, entries of one size, and nothing that would not be written."""

import pytest
import torch
from conversions import convert_checkpoint
from own_models import KINDS, tiny_source, tokens
from tiny_models import needs_constant_norm
from transformers import AutoModelForCausalLM

from surgery.architectures.lr_multipliers import lr_multipliers
from surgery.architectures.neutral_norm import CONSTANT
from surgery.checkpoint import CheckpointReader
from surgery.structures.mla.settings import ConvertSettings
from surgery.training.balanced import balance_latents
from surgery.training.lr_multipliers import factors_of
from surgery.training.settings import HealSettings
from surgery.training.trainable import choose_parameters


def unbalanced(kind: str):
    """A student whose latents' two sides differ a thousandfold, and each from the next."""
    with torch.no_grad():
        model = KINDS[kind](tiny_source("llama"))
        for layer in model.model.layers:
            attention = layer.self_attn
            for block, readers in zip(attention.latent_slices, attention.latent_readers(), strict=False):
                scale = torch.logspace(-3, -1, block.stop - block.start)
                attention.kv_down.weight[block] *= scale[:, None]
                if attention.kv_down.bias is not None:
                    attention.kv_down.bias[block] *= scale
                for reader in readers:
                    reader /= scale
    return model


@pytest.mark.parametrize("kind", ["latent", "low_rank", "blocks", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_function_stays_and_sizes_meet(kind, dtype):
    model = unbalanced(kind).to(dtype)
    with torch.no_grad():
        before = model(tokens()).logits
        choose_parameters(model, HealSettings())
        assert balance_latents(model)
        assert torch.equal(model(tokens()).logits, before)
        for layer in model.model.layers:
            attention = layer.self_attn
            for block, readers in zip(attention.latent_slices, attention.latent_readers(), strict=True):
                result = attention.kv_down.weight[block].float().square().mean(1).sqrt()
                read = torch.cat([reader.float().square() for reader in readers]).mean(0).sqrt()
                assert ((result / read).log2().abs() <= 1.001).all()
        assert not balance_latents_again(model)


def balance_latents_again(model) -> bool:
    """Return whether a second time changes anything."""
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    balance_latents(model)
    return any(not torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "minicpm3"])
@torch.no_grad()
def test_latents_after_a_norm_of_their_own_stay(checkpoints, name):
    """And pairs (i, i + ρ/2), whose two numbers are not next to each other."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints(name), dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight *= torch.logspace(-4, 0, 24)[:, None]
    before = model(tokens()).logits
    choose_parameters(model, HealSettings())
    assert balance_latents(model, {}) == (0 if name == "minicpm3" else 3 * 8)
    assert torch.equal(model(tokens()).logits, before)


@pytest.mark.parametrize("kind", ["tiny", "constant"])
def test_stock_latents_and_rotary_pairs(kind, checkpoints, tmp_path):
    """The constant channel and what reads it stay; all that trains has entries of one size on both sides."""
    source = checkpoints("llama") if kind == "tiny" else needs_constant_norm(tmp_path / "source")
    settings = {"kv_lora_rank": 12, "rope_dim": 4, "carrier": "stock", "calibration": "none"}
    path = convert_checkpoint(source, tmp_path / "stock", ConvertSettings(**settings)).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rules = factors_of(lr_multipliers(CheckpointReader.open(str(path))), model, "test")
    factors = {name: rules[name].dense(each) for name, each in model.named_parameters() if name in rules}
    with torch.no_grad():
        for layer in model.model.layers:
            spread = torch.logspace(-3, -1, 12, base=2).exp2()
            layer.self_attn.kv_a_proj_with_mqa.weight[:12] *= spread[:, None]
            layer.self_attn.kv_a_proj_with_mqa.weight[12 + (kind == "constant") :] *= 1 / 64
            layer.self_attn.kv_b_proj.weight[:, :12] /= spread
        text = tokens() % model.config.vocab_size
        before = model(text).logits
        choose_parameters(model, HealSettings())
        assert balance_latents(model, factors) == 2 * (12 + 4)
        torch.testing.assert_close(model(text).logits, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            down, up = attention.kv_a_proj_with_mqa.weight, attention.kv_b_proj.weight
            query = attention.q_b_proj if kind == "constant" else attention.q_proj
            query = query.weight.unflatten(0, (-1, attention.qk_head_dim))[:, attention.qk_nope_head_dim :]
            result = down[:12].square().mean(1).sqrt()
            if kind == "tiny":
                result = result / factors[f"model.layers.{number}.self_attn.kv_a_proj_with_mqa.weight"][0, 0]
            assert ((result / up[:, :12].square().mean(0).sqrt()).log2().abs() <= 1.001).all()
            pairs = down[-4:].square().mean(1).view(-1, 2).mean(1), query.square().mean((0, 2)).view(-1, 2).mean(1)
            assert ((pairs[0] / pairs[1]).log2().abs() <= 2.002).all()
            if kind == "constant":
                assert not factors[f"model.layers.{number}.self_attn.kv_b_proj.weight"][:, -1].any()
                assert float(attention.kv_a_proj_with_mqa.bias[12]) == CONSTANT and not down[12].any()


def test_a_side_that_does_not_train_keeps_both():
    model = unbalanced("low_rank")
    choose_parameters(model, HealSettings())
    model.model.layers[0].self_attn.kv_down.weight.requires_grad_(False)
    for up in model.model.layers[1].self_attn.value_up.parameters():
        up.requires_grad_(False)
    assert balance_latents(model) == 0


def test_layers_that_share_latents_are_left():
    model = unbalanced("shared")
    choose_parameters(model, HealSettings())
    with torch.no_grad():
        before = model(tokens()).logits
        balance_latents(model)
        assert torch.equal(model(tokens()).logits, before)
