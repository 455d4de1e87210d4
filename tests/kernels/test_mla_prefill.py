"""Prefill attention: both passes against the reference's autograd in float64, and as transformers calls it."""

from types import SimpleNamespace

import pytest
import torch
import triton
from kernel_checks import assert_close
from kernel_examples import Compiled, Example, ints, normal, slow, zeros
from torch.nn.functional import scaled_dot_product_attention

from surgery.kernels.mla_prefill.attention_function import prefill_attention_function
from surgery.kernels.mla_prefill.operator import _mla_prefill, mla_prefill
from surgery.kernels.mla_prefill.reference import document_bounds, prefill_attention

DOCUMENTS = torch.tensor([[0] * 20 + [1] * 25 + [0] * 6, [3] * 51], dtype=torch.int32)

# H, K, T, S, width of keys, of values, what hides tokens.
CASES = {
    "prompt": (2, 2, 37, 37, 48, 32, {}),
    "continued, grouped": (4, 2, 33, 51, 24, 40, {}),
    "one kv head, ragged": (3, 1, 51, 51, 16, 16, {"starts": ints(3, 0), "lengths": ints(51, 40)}),
    "window": (1, 1, 37, 51, 32, 16, {"window": 7}),
    "documents": (1, 1, 51, 51, 16, 32, {"documents": DOCUMENTS}),
    "an empty row": (1, 1, 5, 40, 16, 16, {"lengths": ints(40, 0)}),
}


def inputs_of(case, dtype, device, seed=0):
    heads, kv_heads, tokens, positions, key_width, value_width, masks = CASES[case]
    make = torch.Generator().manual_seed(seed)
    shapes = ((heads, tokens, key_width), (kv_heads, positions, key_width), (kv_heads, positions, value_width))
    # As projections leave them: tokens before heads.
    tensors = [torch.randn(2, n, h, d, generator=make).to(device, dtype).transpose(1, 2) for h, n, d in shapes]
    masks = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in masks.items()}
    for row in range(2):  # what is padding holds NaN
        low = int(masks["starts"][row]) if "starts" in masks else 0
        high = int(masks["lengths"][row]) if "lengths" in masks else positions
        for tensor in tensors[1:]:
            tensor[row, :, :low], tensor[row, :, high:] = torch.nan, torch.nan
    return tensors, masks, torch.randn(2, tokens, heads, value_width, generator=make).to(device, dtype)


def expected_of(tensors, masks, grad, grad_lse):
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    masks = dict(masks)
    documents = masks.pop("documents", None)
    bounds = None if documents is None else document_bounds(documents)
    out, lse = prefill_attention(*exact, 0.3, bounds=bounds, **masks)
    return [out, lse, *torch.autograd.grad((out, lse), exact, (grad.double(), grad_lse.double()))]


def check(case, dtype, device):
    tensors, masks, grad = inputs_of(case, dtype, device)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    out, lse = mla_prefill(*tensors, 0.3, **masks)
    grad_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)).to(device)
    result = [out, lse, *torch.autograd.grad((out, lse), tensors, (grad, grad_lse), retain_graph=True)]
    for name, one, exact in zip(
        ("out", "lse", "dq", "dk", "dv"), result, expected_of(tensors, masks, grad, grad_lse), strict=True
    ):
        assert_close(f"{case}: {name}", one.detach(), exact.detach(), units=6.0)
    return tensors, masks, result, (grad, grad_lse)


@pytest.mark.parametrize("case", CASES)
def test_both_passes_are_the_references(case, device):
    check(case, torch.float32, device)


@pytest.mark.parametrize("case", CASES)
def test_gradients_without_a_kernel(case):
    tensors, masks, grad = inputs_of(case, torch.float64, "cpu")
    out, lse = mla_prefill(*(tensor.requires_grad_() for tensor in tensors), 0.3, **masks)
    grad_lse = torch.randn_like(lse)
    result = torch.autograd.grad((out, lse), tensors, (grad, grad_lse))
    for one, exact in zip(result, expected_of(tensors, masks, grad, grad_lse)[2:], strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-10, atol=1e-10)


def test_half_precision_and_the_same_bits_again(device):
    tensors, masks, result, grads = check("continued, grouped", torch.float16, device)
    out, lse = mla_prefill(*tensors, 0.3, **masks)
    for one, again in zip(result, (out, lse, *torch.autograd.grad((out, lse), tensors, grads)), strict=True):
        assert torch.equal(one, again)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(case, dtype, device):
    check(case, dtype, device)


@pytest.fixture
def module():
    return SimpleNamespace(is_causal=True)


def test_the_attention_function_on_the_cpu_is_pytorchs(module):
    """float64 has no kernel anywhere: PyTorch's attention, with values padded or not."""
    query, key, value = (torch.randn(2, h, 9, d, dtype=torch.float64) for h, d in ((4, 24), (2, 24), (2, 16)))
    wide = [key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)]
    causal = scaled_dot_product_attention(query, *wide, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(prefill_attention_function(module, query, key, value, None)[0], causal)
    mask = torch.rand(2, 1, 9, 9) < 0.7
    mask[..., 0] = True
    expected = scaled_dot_product_attention(query, *wide, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(prefill_attention_function(module, query, key, value, mask)[0], expected)
    with pytest.raises(ValueError, match="softcap"):
        prefill_attention_function(module, query, key, value, None, softcap=3.0)


def test_the_attention_function_gives_masks_to_the_operator_and_to_pytorch_alike(module):
    """Padding on the left, a window and documents: float64 through PyTorch, float32 through the kernel where one is."""
    query, key, value = (torch.randn(2, 2, 18, d) for d in (16, 16, 16))
    there = torch.ones(2, 18, dtype=torch.long)
    there[0, :5] = 0
    documents = torch.tensor([[0] * 9 + [1] * 9] * 2, dtype=torch.int32)
    options = {"sliding_window": 6, "documents": documents, "scaling": 0.3}
    exact = prefill_attention_function(module, query.double(), key.double(), value.double(), there, **options)[0]
    result = prefill_attention_function(module, query, key, value, there, **options)[0]
    assert_close("out", result[1], exact[1])
    assert_close("out behind padding", result[0, 5:], exact[0, 5:])
    reference, _ = prefill_attention(
        query.double(), key.double(), value.double(), 0.3, 6, ints(5, 0), None, document_bounds(documents)
    )
    assert_close("reference", result[0, 5:], reference[0, 5:])


EXAMPLES = {
    "mla_prefill": Example(
        mla_prefill,
        _mla_prefill.registered,
        prefill_attention,
        {"query": normal(1, 2, 3, 8), "key": normal(1, 1, 5, 8), "value": normal(1, 1, 5, 4), "scale": 0.3}
        | {"starts": ints(1), "window": 3},
        [
            ({"query": zeros(1, 2, 6, 8)}, "6 queries, but only 5 keys"),
            ({"starts": torch.zeros(1, dtype=torch.long)}, "starts must be int32"),
            ({"window": 0}, "window"),
        ],
        has_backward=True,
    ),
    "mla_prefill of wide heads": Example(
        mla_prefill,
        _mla_prefill.registered,
        prefill_attention,
        {"query": normal(1, 2, 2, 320), "key": normal(1, 1, 2, 320), "value": normal(1, 1, 2, 8), "scale": 0.3},
        [],
        has_backward=True,
    ),
}


def of_prefill(name, capability, mma):
    return "fp32" in name or mma == ([] if "delta" in name else ["wgmma" if capability == 90 else "mma"])


def spilled(name, capability):
    # Bounds of documents and a window take registers, of which Triton 3.6 has none left.
    few = 24 if (name, capability) == ("masks, forward", 90) and triton.__version__.startswith("3.6.") else 0
    return float("inf") if "fp32" in name else few


COMPILED = [slow(Compiled("compile_mla_prefill:launches_of", of_prefill, spilled=spilled, frames=True))]
