"""Heads in another order: the same function, and back again bit for bit."""

import pytest
import torch
from own_models import FAMILIES, KV_HEADS, agree, tiny_source, tokens

from surgery.transforms.head_order import permute_heads


@pytest.mark.parametrize("family", FAMILIES)
def test_another_order_is_the_same_function(family):
    with torch.no_grad():
        model = tiny_source(family).requires_grad_(False)
    expected = model(tokens()).logits
    before = [layer.self_attn.q_proj.weight.clone() for layer in model.model.layers]
    for layer in model.model.layers:
        order = torch.randperm(KV_HEADS).flip(0).tolist() if KV_HEADS > 2 else [1, 0]
        layer.self_attn.load_state_dict(permute_heads(layer.self_attn.state_dict(), order))
    assert all((a != layer.self_attn.q_proj.weight).any() for a, layer in zip(before, model.model.layers, strict=True))
    agree(model(tokens()).logits, expected, 1e-5)


def test_the_inverse_undoes_it_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    rows = {f"{name}_proj.weight": torch.randn(24 * 2, 7, generator=generator).bfloat16() for name in "qkv"}
    tensors = {**rows, "k_proj.bias": torch.randn(48, generator=generator), "q_norm.weight": torch.randn(4)}
    tensors |= {"o_proj.weight": torch.randn(7, 48, generator=generator), "o_proj.bias": torch.randn(7)}
    for heads in (1, 2, 3, 6):
        order = torch.randperm(heads, generator=generator).tolist()
        again = permute_heads(permute_heads(tensors, order), torch.tensor(order).argsort().tolist())
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_norms_over_all_heads_move_with_them_in_orders_of_all_heads():
    k = torch.arange(4.0)[:, None]
    moved = permute_heads({"k_proj.weight": k, "k_norm.weight": k[:, 0]}, [1, 0])
    assert moved["k_norm.weight"].tolist() == [2, 3, 0, 1]
    with pytest.raises(ValueError, match="not a permutation of 2 heads"):
        permute_heads({}, [0, 0])
