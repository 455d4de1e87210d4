import pytest
import torch
from tiny_models import CONFIGS, FAMILIES, SHAPE
from torch import nn
from transformers import AutoModelForCausalLM

from surgery.eval import roofline
from surgery.eval.kv_cache import forward_with_cache, random_tokens
from surgery.eval.roofline import Ceilings, FlopCount, bound, bytes_read, measure_ceilings
from surgery.eval.tensor_bytes import weight_bytes

CEILINGS = Ceilings(bytes_per_second=1e9, flops_per_second=1e10)
EMBEDDING = 4096 * 32 * 4


def tiny(family: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()


def test_the_longer_of_the_two_bounds():
    assert bound(2e9, 1e10, CEILINGS) == roofline.Bound(2.0, "memory")
    assert bound(1e9, 3e10, CEILINGS) == roofline.Bound(3.0, "compute")


def test_bytes_and_flops_only_ever_add_time():
    sizes = [0, 1e6, 1e9, 1e12]
    for other in sizes:
        by_bytes = [bound(size, other, CEILINGS).seconds for size in sizes]
        by_flops = [bound(other, size, CEILINGS).seconds for size in sizes]
        assert by_bytes == sorted(by_bytes) and by_flops == sorted(by_flops)


def test_an_embedding_is_read_only_as_a_head():
    tied, untied = tiny("llama"), tiny("mistral")
    assert bytes_read(tied, 1) == weight_bytes(tied)
    assert bytes_read(untied, 1) == weight_bytes(untied) - EMBEDDING
    assert bytes_read(untied, 1) == bytes_read(tied, 1)


@pytest.mark.parametrize(("family", "layers", "width"), [("mixtral", 2, 48), ("qwen3_moe", 1, 24)])
def test_experts_are_read_as_they_are_used(family, layers, width):
    model = tiny(family)
    experts = layers * 4 * 3 * 32 * width * 4  # experts, matrices of hidden by width, bytes
    every = weight_bytes(model) - EMBEDDING
    assert bytes_read(model, 1) == pytest.approx(every - experts / 2)  # 2 of 4
    assert bytes_read(model, 2) == pytest.approx(every - experts / 4)
    assert bytes_read(model, 1000) == pytest.approx(every)
    model.config = None
    assert bytes_read(model, 1) == pytest.approx(every)


def flops_of(family: str, new: int, cached: int, batch: int = 1) -> int:
    """By hand, for models of `SHAPE`: two a multiply-add."""
    config = CONFIGS[family]()
    head_dim = getattr(config, "head_dim", None) or 8
    attention = 32 * (4 + 2 + 2 + 4) * head_dim
    dense, expert = 3 * 32 * 48, 3 * 32 * getattr(config, "moe_intermediate_size", 48)
    mlp = {"mixtral": 2 * (2 * expert + 32 * 4), "qwen3_moe": 2 * expert + 32 * 4 + dense}.get(family, 2 * dense)
    seen = sum(range(cached + 1, cached + new + 1))  # keys of every new query, itself included
    scores = 2 * 4 * 2 * head_dim * seen  # layers, heads, Q K^T and P V
    return 2 * batch * (new * (2 * attention + mlp) + 32 * 4096 + scores)


@torch.no_grad()
@pytest.mark.parametrize("family", [family for family in FAMILIES if "window" not in family])
def test_flops_are_those_counted_by_hand(family):
    model = tiny(family)
    prompt, token = random_tokens(model, 3, 20), random_tokens(model, 3, 1)
    with FlopCount() as prefill:
        _, cache = forward_with_cache(model, prompt, None)
    with FlopCount() as decode:
        forward_with_cache(model, token, cache)
    # The angles of RoPE are an outer product, which PyTorch may or may not do as a matrix product.
    assert prefill.flops == pytest.approx(flops_of(family, 20, 0, batch=3), rel=2e-4)
    assert decode.flops == pytest.approx(flops_of(family, 1, 20, batch=3), rel=2e-4)
    assert SHAPE["num_hidden_layers"] == 2


def test_causal_attention_is_half_of_all_scores():
    query = torch.zeros(1, 2, 16, 8)
    with FlopCount() as causal:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    with FlopCount() as full:
        nn.functional.scaled_dot_product_attention(query, query, query)
    assert full.flops == 2 * 2 * 16 * 16 * (8 + 8)
    assert causal.flops == full.flops * 17 // 32


def test_ceilings_are_measured_once(monkeypatch):
    monkeypatch.setattr(roofline, "BUFFER_BYTES", {"cpu": 1 << 20})
    roofline._measure_ceilings.cache_clear()
    first = measure_ceilings(torch.device("cpu"), torch.float32)
    assert first.bytes_per_second > 0 and first.flops_per_second > 0
    assert measure_ceilings("cpu", torch.float32) is first
    roofline._measure_ceilings.cache_clear()


def test_bandwidth_counts_what_is_read_and_written(monkeypatch):
    monkeypatch.setattr(roofline, "BUFFER_BYTES", {"cpu": 1000})
    monkeypatch.setattr(roofline, "_median_seconds", lambda function, device: 0.5)
    assert roofline._copy_bandwidth(torch.device("cpu")) == 4000
    assert roofline._matmul_rate(torch.device("cpu"), torch.float32) == 2 * 256**3 / 0.5
