"""Latents rescaled: the same function bit for bit, entries of one size, and nothing that would not be written."""

import pytest
import torch
from own_models import KINDS, tiny_source, tokens

from surgery.training.balanced import balance_latents
from surgery.training.trainable import choose


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
        choose(model, "attention", teacher_shapes=None, patterns=())
        assert balance_latents(model)
        assert torch.equal(model(tokens()).logits, before)
        for layer in model.model.layers:
            attention = layer.self_attn
            for block, readers in zip(attention.latent_slices, attention.latent_readers(), strict=True):
                made = attention.kv_down.weight[block].float().square().mean(1).sqrt()
                read = torch.cat([reader.float().square() for reader in readers]).mean(0).sqrt()
                assert ((made / read).log2().abs() <= 1.001).all()
        assert not balance_latents_again(model)


def balance_latents_again(model) -> bool:
    """Whether a second time changes anything."""
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    balance_latents(model)
    return any(not torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())


def test_a_side_that_does_not_train_keeps_both():
    model = unbalanced("low_rank")
    choose(model, "attention", teacher_shapes=None, patterns=())
    model.model.layers[0].self_attn.kv_down.weight.requires_grad_(False)
    for up in model.model.layers[1].self_attn.value_up.values():
        up.requires_grad_(False)
    assert balance_latents(model) == 0


def test_layers_that_share_latents_are_left():
    model = unbalanced("shared")
    choose(model, "attention", teacher_shapes=None, patterns=())
    with torch.no_grad():
        before = model(tokens()).logits
        balance_latents(model)
        assert torch.equal(model(tokens()).logits, before)
