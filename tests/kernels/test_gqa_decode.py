"""Grouped-query decoding: the kernel is its reference in float64, the reference is PyTorch's attention."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import assert_close, counts, only_kernels
from kernel_examples import Compiled, Example, any_kind, ints, normal, slow, zeros

from surgery.kernels.gqa_decode.operator import _gqa_decode, gqa_decode
from surgery.kernels.gqa_decode.reference import attention, grouped_query_attention
from surgery.kernels.split_kv import merge

NEVER = float("nan")


def inputs(rows, tokens, heads, groups, d, v, capacity, dtype, device, seed=0):
    """Queries, and keys and values with strides of a cache [S, B, G, d]."""
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, tokens, heads, d, generator=rng)
    key = torch.randn(capacity, rows, groups, d, generator=rng).permute(1, 2, 0, 3)
    value = torch.randn(capacity, rows, groups, v, generator=rng).permute(1, 2, 0, 3)
    return tuple(tensor.to(device, dtype) for tensor in (query, key, value))


def forget(key, value, lengths, starts):
    """NaN after the lengths and before the starts."""
    for row in range(key.shape[0]):
        for tensor in (key, value):
            if lengths is not None:
                tensor[row, :, int(lengths[row]) :] = NEVER
            if starts is not None:
                tensor[row, :, : int(starts[row])] = NEVER


def paged(tensor, page, device):
    """Tokens [B, G, S, ·] as shuffled pages in a pool with unused ones, full of NaN; and the numbers of the pages."""
    rows, groups, tokens, width = tensor.shape
    each = -(-tokens // page)
    order = torch.randperm(rows * each, generator=torch.Generator().manual_seed(1)) + 1
    pool = torch.full((rows * each + 2, groups, page, width), NEVER, dtype=tensor.dtype, device=device)
    filled = F.pad(tensor, (0, 0, 0, each * page - tokens), value=NEVER)
    pool[order.to(device)] = filled.unflatten(2, (each, page)).transpose(1, 2).flatten(0, 1)
    return pool, order.view(rows, each).to(device, torch.int32)


# tokens, heads, groups, d, v, capacity, lengths, starts, window, page, splits
CASES = {
    "multi-head": (1, 3, 3, 64, 64, 111, [1, 63, 111], None, None, None, 1),
    "grouped": (1, 8, 2, 64, 64, 130, [111, 64, 130], [3, 0, 64], None, None, 3),
    "seven heads a key": (1, 28, 4, 32, 32, 63, [63], [5], None, None, 2),
    "one key": (2, 40, 1, 48, 48, 70, [63], None, None, None, 2),
    "one head": (1, 1, 1, 128, 128, 200, None, None, None, None, 5),
    "new tokens": (3, 6, 2, 96, 80, 90, [90, 2, 0], [7, 0, 0], None, None, 3),
    "window": (3, 4, 2, 64, 32, 160, [160, 33], [150, 0], 37, None, 3),
    "wide": (1, 2, 1, 256, 256, 66, [66], None, None, None, 1),
    "pages of 16": (2, 4, 2, 64, 48, 111, [111, 63, 1], [0, 17, 0], None, 16, 2),
    "pages of 128": (1, 4, 2, 64, 64, 250, [250, 129], [130, 0], None, 128, 2),
    "pages and window": (2, 2, 2, 32, 32, 90, [90, 40], None, 20, 10, 2),
    "many new tokens": (21, 4, 1, 32, 32, 40, [40, 21], None, None, None, 1),
}


def check(case, dtype, device, repeat=False):
    tokens, heads, groups, d, v, capacity, lengths, starts, window, page, splits = CASES[case]
    rows = len(lengths) if lengths else 2
    query, key, value = inputs(rows, tokens, heads, groups, d, v, capacity, dtype, device)
    lengths, starts = counts(lengths, device), counts(starts, device)
    expected = grouped_query_attention(
        query.double(), key.double(), value.double(), d**-0.5, lengths, starts, None, window
    )
    forget(key, value, lengths, starts)
    pages = None
    if page is not None:
        (key, pages), (value, _) = paged(key, page, device), paged(value, page, device)
        if lengths is not None:  # numbers of pages that nobody uses
            used = -(-lengths // page)
            pages[torch.arange(pages.shape[1], device=device) >= used[:, None]] = 1 << 30
    call = {"lengths": lengths, "starts": starts, "pages": pages, "window": window, "splits": splits}
    with only_kernels():
        out, lse = gqa_decode(query, key, value, d**-0.5, **call)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close("out", out, expected[0])
    assert_close("lse", lse, expected[1])
    if lengths is not None and (lengths == 0).any():
        assert (out[lengths == 0] == 0).all() and (lse[lengths == 0] == -torch.inf).all()
    if repeat:
        again = gqa_decode(query, key, value, d**-0.5, **call)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_reference(case, device):
    check(case, torch.float16, device, repeat=case in ("grouped", "pages of 16"))


@pytest.mark.parametrize("case", ["grouped", "new tokens", "pages of 16"])
def test_the_kernel_in_float32(case, device):
    check(case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_in_bfloat16(case, device):
    check(case, torch.bfloat16, device)


@pytest.mark.parametrize("window", [None, 5])
def test_the_reference_is_attention_of_pytorch(window):
    query, key, value = inputs(2, 3, 6, 2, 8, 4, 11, torch.float64, "cpu")
    position = torch.arange(8, 11)[:, None]
    visible = torch.arange(11) <= position
    if window:
        visible &= torch.arange(11) > position - window
    expected = F.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=visible, scale=0.3, enable_gqa=True
    )
    out, lse = grouped_query_attention(query, key, value, 0.3, window=window)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-10, atol=1e-10)
    logits = torch.einsum("bthd,bhsd->bths", query, key.repeat_interleave(3, 1)) * 0.3
    expected = logits.masked_fill(~visible[None, :, None], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=1e-10, atol=1e-10)


def test_the_reference_ignores_what_is_not_held():
    query, key, value = inputs(3, 2, 4, 2, 8, 8, 24, torch.float64, "cpu")
    lengths, starts = counts([24, 9, 1], "cpu"), counts([20, 0, 0], "cpu")
    expected = grouped_query_attention(query, key, value, 0.3, lengths, starts)
    for row, (start, end) in enumerate([(20, 24), (0, 9)]):
        cut = (tensor[row : row + 1, :, start:end] for tensor in (key, value))
        out, lse = grouped_query_attention(query[row : row + 1], *cut, 0.3)
        torch.testing.assert_close(expected[0][row], out[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(expected[1][row], lse[0], rtol=1e-10, atol=1e-10)
    assert (expected[0][2, 0] == 0).all() and (expected[1][2, 0] == -torch.inf).all()
    forget(key, value, lengths, starts)
    (key, pages), (value, _) = paged(key, 5, "cpu"), paged(value, 5, "cpu")
    for result, want in zip(
        grouped_query_attention(query, key, value, 0.3, lengths, starts, pages), expected, strict=True
    ):
        torch.testing.assert_close(result, want, rtol=1e-10, atol=1e-10)


def test_layouts_without_a_kernel_run_as_the_reference(device):
    query, key, value = inputs(1, 1, 2, 1, 8, 8, 5, torch.float32, device)
    apart = query, key.transpose(2, 3).contiguous().transpose(2, 3), value
    wide = inputs(1, 1, 2, 1, 600, 600, 5, torch.float16, device)
    for tensors in (apart, wide):
        for result, want in zip(gqa_decode(*tensors, 0.3), grouped_query_attention(*tensors, 0.3), strict=True):
            assert torch.equal(result, want)


def test_an_empty_cache(device):
    query, key, value = inputs(2, 1, 4, 2, 32, 32, 0, torch.float16, device)
    for function in (gqa_decode, grouped_query_attention):
        out, lse = function(query, key, value, 0.3)
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_tokens_of_two_caches_merge_to_one(device):
    """Lengths and starts may lie outside a cache that holds only the tail of the tokens."""
    query, key, value = inputs(2, 3, 4, 2, 32, 32, 80, torch.float32, device)
    lengths, starts = counts([80, 66], device), counts([70, 9], device)
    expected = grouped_query_attention(query, key, value, 0.3, lengths, starts, window=30)
    rows = {"lengths": lengths - 64, "starts": starts - 64, "window": 30}
    parts = [gqa_decode(query, key[:, :, 64:], value[:, :, 64:], 0.3, **rows, splits=1)]
    visible = torch.arange(64, device=device) <= (lengths[:, None] - 3 + torch.arange(3, device=device))[..., None]
    visible &= torch.arange(64, device=device) > (lengths[:, None] - 33 + torch.arange(3, device=device))[..., None]
    visible &= torch.arange(64, device=device) >= starts[:, None, None]
    parts.append(attention(query, key[:, :, :64], value[:, :, :64], 0.3, visible))
    out, lse = merge(torch.stack([part[0] for part in parts], -2), torch.stack([part[1] for part in parts], -1))
    assert_close("out", out, expected[0].double())
    assert_close("lse", lse, expected[1].double())


EXAMPLES = {
    "gqa_decode": Example(
        gqa_decode,
        _gqa_decode.registered,
        grouped_query_attention,
        {"query": normal(2, 2, 4, 6), "key": normal(2, 2, 7, 6), "value": normal(2, 2, 7, 5), "scale": 0.4}
        | {"lengths": ints(7, 1), "starts": ints(2, 0), "window": 4},
        [
            ({"key": zeros(2, 3, 7, 6)}, "values"),
            ({"query": zeros(2, 2, 5, 6)}, "5 query heads must be a multiple of 2 KV heads"),
            ({"query": zeros(2, 2, 4, 8)}, "must agree in d"),
            ({"query": zeros(3, 2, 4, 6)}, "batch size is 3 for queries, 2 for keys"),
            ({"query": zeros(2, 2, 4, 6, dtype=torch.float16)}, "float16"),
            ({"lengths": zeros(2)}, "lengths"),
            ({"starts": ints(0, 0, 0)}, "starts"),
            ({"pages": zeros(2, 2)}, "pages"),
            ({"window": 0}, "window"),
            ({"splits": 0}, "splits"),
        ],
    ),
    "gqa_decode in pages": Example(
        gqa_decode,
        _gqa_decode.registered,
        grouped_query_attention,
        {"query": normal(2, 2, 4, 6), "key": normal(5, 2, 4, 6), "value": normal(5, 2, 4, 5), "scale": 0.4}
        | {"pages": ints([3, 1], [0, 4])},
        [],
        settings={"splits": 2},
    ),
}
COMPILED = [slow(Compiled("compile_gqa_decode:dense", any_kind))]
