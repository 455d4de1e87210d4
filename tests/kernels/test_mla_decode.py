"""Absorbed latent attention: the kernel against its reference in fp64, and what the compiler makes of it."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import assert_close
from kernel_examples import Compiled, Example, ints, normal, slow, zeros

from surgery.kernels.launch import Config
from surgery.kernels.mla_decode import kernel
from surgery.kernels.mla_decode.operator import _mla_decode, mla_decode
from surgery.kernels.mla_decode.reference import ragged_latent_attention
from surgery.kernels.operation import attention_outputs
from surgery.kernels.reference import paged_tokens

SMALL = Config(block_rows=16, block_tokens=16, chunk=16, warps=4, stages=2)


def inputs(batch, tokens, heads, total, rank, rope, dtype=torch.float32, device="cpu", gains=0, seed=0):
    """query, latent, rope_key and key_gain."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, heads, rank + rope), (batch, total, rank), (batch, total, rope), (batch, total, gains)]
    query, latent, rope_key, gain = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    return query, latent, rope_key, gain.abs() + 0.5 if gains else None


def run(query, latent, rope_key, scale, *, splits=1, config=SMALL, **extra):
    """The kernel itself, at a number of splits."""
    out, lse = attention_outputs(query, latent.shape[-1])
    config = replace(config, splits=splits)
    for launch in kernel.launches(query, latent, rope_key, scale, **extra, out=out, lse=lse, config=config):
        launch.run()
    return out, lse


def check(query, latent, rope_key, scale=0.1, *, units=4.0, **extra):
    """The kernel against the reference in fp64, of inputs whose hidden tokens are clean; twice on a GPU."""
    splits, config = extra.pop("splits", 1), extra.pop("config", SMALL)
    result = run(query, latent, rope_key, scale, splits=splits, config=config, **extra)
    if query.is_cuda:  # Triton's interpreter runs programs in one order
        again = run(query, latent, rope_key, scale, splits=splits, config=config, **extra)
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in extra.items()}
    expected = ragged_latent_attention(query.double(), latent.double(), rope_key.double(), scale, **wide)
    assert_close("out", result[0], expected[0], units=units)
    assert_close("lse", result[1], expected[1])
    return result


def test_the_reference_is_plain_softmax():
    query, latent, rope_key, gain = (t.double() for t in inputs(2, 3, 4, 9, 6, 2, gains=2))
    logits = torch.einsum("bthc,bsc->bths", query, torch.cat([latent, rope_key], -1)) * 0.3
    logits = logits * gain.repeat_interleave(2, -1).mT[:, None]
    visible = logits.masked_fill(~torch.ones(3, 9, dtype=torch.bool).tril(6)[:, None], -torch.inf)
    out, lse = ragged_latent_attention(query, latent, rope_key, 0.3, key_gain=gain)
    torch.testing.assert_close(out, visible.softmax(-1) @ latent[:, None], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, visible.logsumexp(-1), rtol=1e-10, atol=1e-10)


def test_the_reference_ends_rows_where_they_end():
    """Rows of other lengths, padded before and after, are the rows alone."""
    query, latent, rope_key, _ = (t if t is None else t.double() for t in inputs(3, 2, 2, 9, 4, 2))
    lengths, starts = ints(9, 5, 2), ints(0, 3, 2)
    whole = ragged_latent_attention(query, latent, rope_key, 0.3, lengths, starts)
    for row, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        each = ragged_latent_attention(
            query[row, None], latent[row, None, start:length], rope_key[row, None, start:length], 0.3
        )
        for result, expected in zip(whole, each, strict=True):
            torch.testing.assert_close(result[row], expected[0], rtol=1e-12, atol=1e-12)
    assert whole[0][2].abs().max() == 0 and (whole[1][2] == -torch.inf).all()


SHAPES = [(1, 48, 16, 63, 16), (7, 96, 8, 111, 32), (28, 320, 64, 40, 64), (40, 72, 0, 33, 32), (8, 40, 12, 17, 64)]
"""Heads, rank, rotary dimensions, tokens, tokens of a chunk: each by default in one dtype, in turn."""


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "total", "chunk", "dtype"),
    [
        pytest.param(*shape, dtype, marks=[pytest.mark.slow] * ((index + number) % 2))
        for index, shape in enumerate(SHAPES)
        for number, dtype in enumerate((torch.float16, torch.float32))
    ]
    + [pytest.param(*shape, torch.bfloat16, marks=pytest.mark.gpu) for shape in SHAPES],
)
def test_any_shape(heads, rank, rope, total, chunk, dtype, device):
    """Ranks of equal chunks and of a masked one, RoPE of any width, odd heads and tokens."""
    query, latent, rope_key, _ = inputs(2, 1, heads, total, rank, rope, dtype, device)
    config = Config(32 if heads > 16 else 16, 16, chunk)
    check(query, latent, rope_key, splits=2, config=config, lengths=ints(total, 1, device=device))


@pytest.mark.parametrize(
    ("splits", "dtype"),
    [
        (1, torch.float32),
        pytest.param(5, torch.float32, marks=pytest.mark.slow),
        (2, torch.float16),
        pytest.param(3, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_ragged_rows(splits, dtype, device):
    """Lengths of nothing, one token, part and all; padding before; NaN wherever nothing may look."""
    query, latent, rope_key, gain = inputs(5, 3, 5, 111, 32, 16, dtype, device, gains=5)
    lengths, starts = ints(0, 1, 63, 111, 70, device=device), ints(0, 0, 17, 3, 70, device=device)
    clean = check(query, latent, rope_key, splits=splits, lengths=lengths, starts=starts, key_gain=gain)
    token = torch.arange(111, device=device)
    hidden = (token >= lengths[:, None]) | (token < starts[:, None])
    for tensor in (latent, rope_key, gain):
        tensor[hidden] = torch.nan
    poisoned = run(query, latent, rope_key, 0.1, splits=splits, lengths=lengths, starts=starts, key_gain=gain)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert clean[0][0].abs().max() == 0 and (clean[1][0] == -torch.inf).all()


@pytest.mark.parametrize("page", [16, 12])
def test_pages(page, device):
    """Shuffled pages of a pool, most of them NaN, are the tokens in a row; table entries after a row are nonsense."""
    query, latent, rope_key, gain = inputs(3, 2, 6, 5 * page, 48, 16, device=device, gains=3)
    lengths, starts = ints(5 * page, 2 * page + 1, 1, device=device), ints(3, 0, 0, device=device)
    pages = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:15].view(3, 5).int().to(device)
    pools = []
    for tensor in (latent, rope_key, gain):
        pool = torch.full((20, page, tensor.shape[-1]), torch.nan, device=device)
        pool[pages.flatten().long()] = tensor.unflatten(1, (5, page)).flatten(0, 1)
        pools.append(pool)
        assert torch.equal(paged_tokens(pool, pages), tensor)
    expected = check(query, latent, rope_key, splits=2, lengths=lengths, starts=starts, key_gain=gain)
    pages[1, 3:], pages[2, 1:] = -1, 10**6
    result = run(
        query, pools[0], pools[1], 0.1, splits=2, lengths=lengths, starts=starts, pages=pages, key_gain=pools[2]
    )
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_views_of_one_cache(device):
    """Latent and rotated key side by side in one cache of one head, in a batch that is itself a slice."""
    query, latent, rope_key, _ = inputs(2, 2, 7, 50, 48, 16, device=device)
    cache = torch.full((3, 1, 64, 80), torch.nan, device=device)
    cache[1:, 0, :50, :48], cache[1:, 0, :50, 48:64] = latent, rope_key
    views = cache[1:, 0, :50, :48], cache[1:, 0, :50, 48:64]
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(run(turned, *views, 0.1), run(query, latent, rope_key, 0.1), strict=True)
    )


def test_the_operator_runs_the_kernel(device, caplog):
    """Default configuration, chosen splits; float64 goes to the reference and says so."""
    query, latent, rope_key, _ = inputs(1, 1, 4, 90, 64, 16, device=device)
    expected = ragged_latent_attention(query.double(), latent.double(), rope_key.double(), 0.1)
    for result, want in zip(mla_decode(query, latent, rope_key, 0.1), expected, strict=True):
        assert_close("operator", result, want)
    assert not caplog.records
    exact = mla_decode(query.double(), latent.double(), rope_key.double(), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(exact, expected, strict=True))


EXAMPLES = {
    "mla_decode": Example(
        mla_decode,
        _mla_decode.registered,
        ragged_latent_attention,
        {"query": normal(2, 2, 4, 10), "latent": normal(2, 9, 8), "rope_key": normal(2, 9, 2), "scale": 0.2}
        | {"lengths": ints(9, 7), "key_gain": normal(2, 9, 2)},
        [
            ({"query": zeros(2, 2, 4, 9)}, "query size must be"),
            ({"rope_key": zeros(2, 8, 2)}, "must hold the same tokens"),
            ({"query": zeros(1, 2, 4, 10)}, "batch size"),
            ({"query": zeros(2, 2, 4, 10).half()}, "the same dtype"),
            ({"lengths": torch.tensor([3, 4])}, "lengths"),
            ({"pages": ints(0, 1)}, "pages"),
            ({"key_gain": zeros(2, 9, 3)}, "must be a multiple of 3 gains"),
        ],
    ),
}


def of_many_rows(name, capability, mma):
    """Hopper's where 64 rows are worth them."""
    rows_of_wgmma = capability == 90 and (name.startswith(("40", "128")) or "4 tokens" in name)
    return mma == ([] if "fp32" in name else ["wgmma"] if rows_of_wgmma else ["mma"])


COMPILED = [
    slow(Compiled("compile_mla_decode:cases", of_many_rows, frames=True)),
    slow(Compiled("compile_mla_decode:block_cases", of_many_rows, frames=True)),
]
