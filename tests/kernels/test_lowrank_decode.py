"""Attention over rebuilt keys, whatever the ranks, ranges, norms, rows and splits."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import assert_close
from kernel_examples import Compiled, Example, ints, normal, slow, zeros

from surgery.kernels.lowrank_decode.launches import default_config, launches
from surgery.kernels.lowrank_decode.operator import _lowrank_decode, lowrank_decode, rotation_tables
from surgery.kernels.lowrank_decode.reference import lowrank_attention


def inputs(batch, tokens, heads, kv_heads, dim, rank, slots, *, width=None, biased=False, norm=False, seed=0):
    """fp64 tensors; keys of a size that makes the softmax neither flat nor one token's."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    width = width or rank
    settings = {
        "query": normal(batch, tokens, heads, dim),
        "latent": normal(batch, slots, width),
        "key_up": normal(kv_heads, dim, rank) / rank**0.5,
        "inv_freq": 10_000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2)),
    }
    if biased:
        settings["key_bias"] = normal(kv_heads, dim)
    if norm:
        settings |= {"norm_weight": 1 + 0.1 * normal(dim), "norm_eps": 1e-6}
    return settings


def turned(keys, slots, inv_freq):
    """Keys [..., n, d] rotated to slots [n], by the formula."""
    angles = slots.double()[..., None] * inv_freq
    real, imag = keys.chunk(2, dim=-1)
    return torch.cat([real * angles.cos() - imag * angles.sin(), imag * angles.cos() + real * angles.sin()], dim=-1)


def normed(keys, settings):
    """Keys [G, n, d] with bias and norm."""
    if "key_bias" in settings:
        keys = keys + settings["key_bias"][:, None]
    if "norm_weight" in settings:
        keys = keys / (keys.square().mean(-1, keepdim=True) + settings["norm_eps"]).sqrt() * settings["norm_weight"]
    return keys


def by_hand(query, key, value, scale):
    """One query [H, d]: keys [G, n, d] and values [G, n, v] of tokens, all seen → [H, v]."""
    size = query.shape[0] // key.shape[0]
    weights = (query.unflatten(0, (-1, size)) @ key.mT * scale).softmax(-1)
    return (weights @ value).flatten(0, 1)


def test_keys_are_rebuilt_normalized_and_rotated_to_their_slots():
    settings = inputs(1, 2, 4, 2, 8, 5, 200, biased=True, norm=True)
    inv_freq = settings.pop("inv_freq")
    rotation = rotation_tables(inv_freq, 200, torch.float64)
    out, lse = lowrank_decode(**settings, scale=0.3, rotation=rotation, starts=ints(3), lengths=ints(190))
    for token, own in enumerate((188, 189)):
        visible = torch.arange(3, own + 1)
        latent = settings["latent"][0, visible]
        key = turned(normed(latent @ settings["key_up"].mT, settings), visible, inv_freq)
        expected = by_hand(settings["query"][0, token], key, latent.expand(2, -1, -1), 0.3)
        torch.testing.assert_close(out[0, token], expected, rtol=1e-10, atol=1e-10)
        logits = settings["query"][0, token].unflatten(0, (2, 2)) @ key.mT * 0.3
        torch.testing.assert_close(lse[0, token], logits.logsumexp(-1).flatten().float())


CASES = {
    "odd": dict(shape=(3, 1, 8, 4, 32, 48, 111), lengths=(111, 63, 1), splits=2, block_tokens=32),
    "one head of seven, three tokens": dict(
        shape=(2, 3, 7, 1, 16, 96, 70), lengths=(70, 50), starts=(0, 7), splits=5, biased=True, norm=True,
    ),
    "blocks of ranks": dict(
        shape=(1, 1, 28, 4, 16, 96, 63), lengths=(63,), width=320, splits=1, chunk=32,
        ranges=[(0, 96, 0, 96), (0, 96, 64, 32), (96, 80, 200, 120), (224, 96, 96, 64)],
    ),
    "many heads, little rank": dict(shape=(1, 1, 40, 40, 6, 7, 40), lengths=(33,), splits=1),
    "rows without tokens": dict(shape=(2, 1, 4, 2, 16, 320, 65), lengths=(0, 65), splits=2, passing=True),
}  # fmt: skip


def case(name, dtype, device):
    """Kernel arguments in `dtype` whose unseen tokens are NaN, what the reference is given, and how to run them."""
    how = dict(CASES[name])
    settings = inputs(
        *how.pop("shape"),
        width=how.pop("width", None),
        biased=how.pop("biased", False),
        norm=how.pop("norm", False),
    )
    inv_freq = settings.pop("inv_freq")
    options = {}
    for key in ("lengths", "starts"):
        if key in how:
            options[key] = torch.tensor(how.pop(key), dtype=torch.int32)
    if "ranges" in how:
        options["ranges"] = [number for head in how.pop("ranges") for number in head]
    batch, slots = settings["latent"].shape[:2]
    zero = torch.zeros(batch, dtype=torch.int32)
    slot = torch.arange(slots)
    hidden = (slot >= options["lengths"][:, None]) | (slot < options.get("starts", zero)[:, None])
    settings["latent"][hidden] = torch.nan
    settings = {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
    wide = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
    wide |= options | dict(zip(("within", "begins"), rotation_tables(inv_freq, 512, torch.float64), strict=True))
    settings |= options | dict(zip(("within", "begins"), rotation_tables(inv_freq, 512), strict=True))
    settings = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
    return settings, wide, how


def run(settings, *, splits, passing=False, **changes):
    """Outputs of the kernel with so many splits."""
    query, latent, key_up, ranges = (settings.get(key) for key in ("query", "latent", "key_up", "ranges"))
    batch, tokens, heads, dim = query.shape
    rank = latent.shape[-1] if ranges is None else max(ranges[3::4])
    config = default_config(dim=dim, key_rank=key_up.shape[-1], value_rank=rank, dtype=query.dtype)
    out, log = query.new_empty(batch, tokens, heads, rank), query.new_empty(batch, tokens, heads, dtype=torch.float32)
    config = replace(config, splits=splits, **changes)
    with pytest.MonkeyPatch.context() as patch:
        if passing:
            patch.setattr("surgery.kernels.lowrank_decode.launches.RESIDENT_BYTES", 0)
        for launch in launches(**settings, scale=dim**-0.5, out=out, lse=log, config=config):
            launch.run()
    return out, log


def check(name, dtype, device):
    inputs, wide, how = case(name, dtype, device)
    out, log = run(inputs, **how)
    both, lse = lowrank_attention(**wide, scale=inputs["query"].shape[-1] ** -0.5)
    assert_close("out", out.cpu(), both)
    assert_close("lse", log.cpu(), lse, units=4 * 2**13 if dtype != torch.float32 else 4)
    if out.is_cuda or dtype == torch.float16:  # Triton's interpreter runs programs in one order
        again, _ = run(inputs, **how)
        assert torch.equal(out, again)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_reference(name, device):
    check(name, torch.float32, device)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "odd")) for name in CASES])
def test_the_kernel_in_fp16(name, device):
    check(name, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_in_bf16(name, device):
    check(name, torch.bfloat16, device)


WITHIN, BEGINS = rotation_tables(10.0 ** -torch.arange(2.0), 9, torch.float64)
EXAMPLES = {
    "lowrank_decode": Example(
        lowrank_decode,
        _lowrank_decode.registered,
        lowrank_attention,
        {"query": normal(1, 2, 4, 4), "latent": normal(1, 9, 6), "key_up": normal(2, 4, 6), "scale": 0.25}
        | {"key_bias": normal(2, 4), "norm_weight": normal(4), "norm_eps": 1e-6, "lengths": ints(9)},
        [
            ({"query": zeros(1, 2, 4, 2)}, "4 query heads of size 2"),
            ({"latent": zeros(1, 9, 5), "ranges": None}, "pass `ranges`"),
            ({"ranges": [(0, 6, 0, 6), (1, 6, 0, 6)]}, "within 6 latents and key rank 6"),
            ({"lengths": ints(9, 9)}, r"lengths must be \[1\]"),
        ],
        of_function={"rotation": (WITHIN, BEGINS), "ranges": [(0, 6, 1, 4)] * 2},
        of_operator={"within": WITHIN, "begins": BEGINS, "ranges": [0, 6, 1, 4] * 2},
    ),
}


def among_others(name, capability, mma):
    return ("wgmma" if capability == 90 else "mma") in mma


def spilled(name, capability):
    """Bytes, where a few addresses are over 255 registers."""
    most = {"joint": 8, "Llama-3-8B, joint 1024": 128, "Llama-2-7B, blocks of four heads": 124}
    return most.get(name, 0) if capability == 80 else 0


def launches_compiled(name, *capabilities):
    return Compiled(f"compile_lowrank_decode:{name}", among_others, capabilities, spilled, frames=True)


COMPILED = [launches_compiled("few", 90), slow(launches_compiled("few", 80)), slow(launches_compiled("more", 80, 90))]
