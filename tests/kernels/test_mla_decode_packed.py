"""Latent attention over packed rows: the kernel against its reference, that against the cache that it serves."""

import os
import shutil
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from kernel_checks import assert_close, only_kernels
from kernel_examples import Compiled, Example, ints, normal, slow, zeros

from surgery.kernels import cpu
from surgery.kernels.launch import Config
from surgery.kernels.lowrank_decode.reference import rotation_tables
from surgery.kernels.mla_decode import packed_kernel as kernel
from surgery.kernels.mla_decode.operator import mla_decode
from surgery.kernels.mla_decode.packed_operator import _mla_decode_packed, mla_decode_packed
from surgery.kernels.mla_decode.packed_reference import packed_latent_attention
from surgery.kernels.mla_decode.reference import ragged_latent_attention
from surgery.kernels.mla_decode.row_slots import slot_table
from surgery.kernels.operation import attention_outputs
from surgery.kernels.pack_rows.operator import pack_rows
from surgery.kernels.unpack_rows.operator import _unpack_rows, unpack_rows
from surgery.kernels.unpack_rows.reference import unpack_to_memory
from surgery.model.attention_functions import rotate_pairs
from surgery.model.left_padding import LeftPadding
from surgery.model.token_cache import TokenCacheLayer
from surgery.model.token_format import PATTERNS, TokenFormat
from surgery.model.token_quantizer import TokenQuantizer

SHORT = (("4+4", 8),), (("5+3", 4),)
EVERY = tuple((name, 2) for name in PATTERNS), tuple((name, 2) for name in PATTERNS)
TWO_TILES = (("4+4", 24), ("3+3+2", 16)), (("5+3", 4),)


LSE_UNITS = {torch.float32: 6, torch.float16: 2**12, torch.bfloat16: 2**15}
"""Roundings of fp32, as large as those of the keys."""


def flat(runs):
    """`fields` and rank of runs, as the operator takes them."""
    return tuple(chain.from_iterable(TokenFormat(sum(runs, ())).fields())), TokenFormat(runs[0]).channels


def inputs(
    runs, batch=2, tokens=1, heads=4, total=60, gains=0, first=3, with_keys=False, dtype=torch.float32, device="cpu"
):
    """Arguments of the operator: rows of normal values, and first tokens far from all others."""
    fields, rank = flat(runs)
    quantizer = TokenQuantizer(TokenFormat(sum(runs, ())))
    generator = torch.Generator().manual_seed(total + rank)
    width = quantizer.format.channels
    scales = torch.linspace(0.2, 3, width)
    scales[rank:] = scales[rank::2].repeat_interleave(2)
    quantizer.step = 6 * scales / (quantizer.highest + 1)
    quantizer.step[rank:] = quantizer.step[rank::2].repeat_interleave(2)
    quantizer.mean = torch.randn(width, generator=generator)
    values = torch.randn(batch, total, width, generator=generator) * scales + quantizer.mean
    rows = quantizer.encode(values)
    if gains:
        gain = 0.5 + torch.rand(batch, total, gains, generator=generator)
        rows = torch.cat([rows, gain.half().view(torch.uint8)], dim=-1)
    query = torch.randn(batch, tokens, heads, 2 * width - rank if with_keys else width, generator=generator)
    exact = torch.randn(batch, first, width, generator=generator) * 20 if first else None
    return {
        "query": query.to(device, dtype),
        "rows": rows.view(torch.int16).to(device),
        "step": quantizer.step.to(device),
        "mean": quantizer.mean.to(device),
        "scale": 0.1,
        "fields": fields,
        "rank": rank,
        "rotation": rotation_tables(2.0 ** -torch.arange((width - rank) / 2, device=device), total),
        "exact": None if exact is None else exact.to(device, dtype),
    }


def apart(arguments):
    """Arguments of the reference."""
    within, begins = arguments["rotation"]
    return {name: value for name, value in arguments.items() if name != "rotation"} | {
        "within": within,
        "begins": begins,
    }


def wide(arguments):
    """Floating-point tensors in float64."""
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()}


def run(arguments, splits=1, chunk=16, block_tokens=16):
    """The kernel, in memory of NaN."""
    arguments = apart(arguments)
    width = arguments["query"].shape[-1] + arguments["rank"] - len(arguments["step"])
    out, lse = (memory.fill_(torch.nan) for memory in attention_outputs(arguments["query"], width))
    config = Config(16, block_tokens, chunk, splits)
    for launch in kernel.launches(**arguments, out=out, lse=lse, config=config):
        launch.run()
    return out, lse


def run_on_cpu(arguments):
    """The C++ kernel; None without it."""
    if arguments["query"].device.type != "cpu" or cpu.load() is not None:
        return None
    return torch.ops.surgery_cpu.mla_decode_packed(**apart(arguments))


def check(arguments, **cut):
    """The kernels against the reference in float64; return the Triton kernel's results."""
    result, expected = run(arguments, **cut), packed_latent_attention(**wide(apart(arguments)))
    for out, lse in filter(None, (run_on_cpu(arguments), result)):
        assert_close("out", out, expected[0], units=6)
        assert_close("lse", lse, expected[1], units=LSE_UNITS[arguments["query"].dtype])
    return result


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_cpu_kernels_compile():
    assert cpu.load() is None


def test_no_compiler_is_a_reason(tmp_path, monkeypatch):
    """Nothing stays behind that a later attempt would take for the library; ninja is found beside the interpreter."""
    before = os.environ["PATH"]

    def fail(*arguments, **settings):
        assert os.environ["PATH"].startswith(str(Path(sys.executable).parent))
        raise RuntimeError("Ninja is required\nmore lines")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr("torch.utils.cpp_extension.load", fail)
    assert cpu.load.__wrapped__().endswith("Ninja is required")
    assert list((tmp_path / "extensions").iterdir()) == [] and os.environ["PATH"] == before


@pytest.mark.parametrize(
    ("dtype", "runs", "changes", "cut"),
    [
        (torch.float16, EVERY, {"tokens": 2, "heads": 5, "total": 40}, {"splits": 2}),
        (torch.float32, TWO_TILES, {"gains": 2, "total": 140}, {"block_tokens": 64}),
        (torch.float32, EVERY, {"with_keys": True, "gains": 2, "tokens": 2, "total": 140}, {"splits": 2}),
        (torch.float16, SHORT, {"with_keys": True, "total": 20}, {}),
        (torch.float16, SHORT, {"first": 0, "total": 20}, {}),
        pytest.param(torch.bfloat16, TWO_TILES, {"heads": 9}, {"splits": 2}, marks=pytest.mark.gpu),
    ],
)
def test_patterns(dtype, runs, changes, cut, device):
    """Runs of all patterns that begin anywhere in a tile; tokens that end and begin anywhere."""
    arguments = inputs(runs, dtype=dtype, device=device, **changes)
    total = arguments["rows"].shape[1]
    rows = {"lengths": ints(total, total - 9, device=device)}
    if arguments["exact"] is not None:
        rows |= {"starts": ints(0, 5, device=device), "exact_starts": ints(0, 5, device=device)}
    check(arguments | rows, **cut)


def test_queries_of_rotated_keys_alone(device):
    """Latents and unrotated keys, which change no score then, are values only."""
    arguments = inputs(TWO_TILES, with_keys=True, device=device)
    width = len(arguments["step"])
    arguments["query"][..., :width] = 0
    out, _ = check(arguments)
    assert out.shape[-1] == width and out.abs().amax(dim=(0, 1, 2)).min() > 0


def test_rows_in_pages(device):
    arguments = inputs(SHORT, total=48, gains=2, device=device)
    dense = check(arguments | {"lengths": ints(48, 18, device=device)}, splits=2)
    pages = ints([3, 0, 5], [1, 4, 2], device=device)
    paged = torch.empty(6, 16, arguments["rows"].shape[-1], dtype=torch.int16, device=device)
    paged[pages.long()] = arguments["rows"].view(2, 3, 16, -1)
    arguments |= {"rows": paged, "pages": pages, "lengths": ints(48, 18, device=device)}
    assert all(map(torch.equal, run(arguments, splits=2), dense))


@pytest.mark.parametrize(("dtype", "with_keys"), [(torch.float32, True), (torch.float16, False)])
def test_rows_are_unpacked_to_their_pages(dtype, with_keys, device):
    """Blocks of bytes as vLLM shares them among layers: rows, and memory that `mla_decode` reads by the same table."""
    arguments = inputs(EVERY, total=48, gains=2, with_keys=with_keys, dtype=dtype, device=device)
    query, rows, rank = arguments["query"], arguments["rows"], arguments["rank"]
    lengths, pages = ints(48, 18, 0, device=device), ints([3, 0, 5], [1, 4, -1], [-1, 10**6, 0], device=device)
    query, exact = (torch.cat((each, each[:1])) for each in (query, arguments["exact"]))
    width, row_bytes = query.shape[-1], 2 * rows.shape[-1]
    blocks = torch.full((6, 16 * (row_bytes + width * dtype.itemsize)), 255, dtype=torch.uint8, device=device)
    packed = blocks[:, : 16 * row_bytes].view(torch.int16).unflatten(1, (16, -1))
    packed[pages[:2].flatten()[:5].long()] = rows.view(6, 16, -1)[:5]
    memory = blocks[:, 16 * row_bytes :].view(dtype).unflatten(1, (16, width))
    rope_dim = len(arguments["step"]) - rank
    latent, rope_key = memory.split((width - rope_dim, rope_dim), dim=-1)
    names = ("step", "mean", "fields", "rotation")
    settings = {"exact": exact, "lengths": lengths, "pages": pages} | {name: arguments[name] for name in names}
    with only_kernels():
        assert unpack_rows(packed, latent=latent, rope_key=rope_key, **settings) is None
        gain = packed[..., -2:].view(torch.float16)
        result = mla_decode(query, latent, rope_key, 0.1, lengths=lengths, pages=pages, key_gain=gain)
    whole = arguments | {"query": query, "rows": packed, "exact": exact, "lengths": lengths, "pages": pages}
    expected = packed_latent_attention(**wide(apart(whole)))
    assert_close("out", result[0], expected[0], units=6)
    assert_close("lse", result[1], expected[1], units=LSE_UNITS[dtype])
    copy = memory.clone()
    memory.fill_(torch.nan)
    unpack_to_memory(packed, **{**apart(settings), "latent": latent, "rope_key": rope_key})
    torch.testing.assert_close(memory, copy, rtol=2e-3, atol=2e-3, equal_nan=True)
    with pytest.raises(ValueError, match="latent"):
        unpack_rows(packed, latent=latent[:5], rope_key=rope_key, **settings)


def test_unpacking_is_an_operator_that_fills_its_memory(device):
    arguments = apart(inputs(SHORT, total=32, first=0, device=device))
    names = ("step", "mean", "fields", "within", "begins")
    rows, memory = arguments["rows"].view(4, 16, -1), torch.zeros(4, 16, 24, device=device)
    arguments = {name: arguments[name] for name in names} | {"rows": rows, "fields": list(arguments["fields"])}
    arguments |= {"latent": memory[..., :16].clone(), "rope_key": memory[..., 16:].clone()}
    arguments |= {"lengths": ints(32, 9, device=device), "pages": ints([3, 0], [1, 2], device=device)}
    torch.library.opcheck(_unpack_rows.registered, (), arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_nothing_sees_is_never_used(device):
    """Rows after a text and before it, first tokens that have not come; a text without tokens; the same bits."""
    arguments = inputs(SHORT, batch=4, gains=2, device=device)
    arguments |= {"lengths": ints(60, 33, 0, 2, device=device), "starts": ints(20, 0, 0, 0, device=device)}
    arguments |= {"exact_starts": ints(20, 0, 0, 0, device=device)}
    clean, clean_on_cpu = check(arguments, splits=2), run_on_cpu(arguments)
    assert clean[0][2].abs().max() == 0 and (clean[1][2] == -torch.inf).all()
    token = torch.arange(60, device=device)
    arguments["rows"][(token >= arguments["lengths"][:, None]) | (token < arguments["starts"][:, None])] = -1
    arguments["exact"][3, 2], arguments["exact"][2] = torch.nan, torch.nan
    assert all(map(torch.equal, clean, run(arguments, splits=2)))
    assert clean_on_cpu is None or all(map(torch.equal, clean_on_cpu, run_on_cpu(arguments)))


@pytest.mark.parametrize("total", [300, 1100])
def test_long_texts_on_several_threads(total):
    """Parts of a text that threads read, in tiles and turns of the queries; more heads than a vector has lanes."""
    if cpu.load() is not None:
        pytest.skip(cpu.load())
    arguments = inputs(EVERY, heads=20, tokens=2, total=total)
    out, lse = run_on_cpu(arguments)
    expected = packed_latent_attention(**wide(apart(arguments)))
    assert_close("out", out, expected[0], units=6)
    assert_close("lse", lse, expected[1], units=6)


def test_the_reference_reads_what_the_cache_holds():
    """First real tokens in full precision, padding on the left, keys rotated by their positions."""
    runs = EVERY
    fields, rank = flat(runs)
    quantizer = TokenQuantizer(TokenFormat(sum(runs, ())))
    quantizer.step.fill_(0.25)
    width, frequencies = quantizer.format.channels, 0.5 ** torch.arange(float((quantizer.format.channels - rank) // 2))
    layer = TokenCacheLayer(quantizer.format.row_bytes, width, 3)
    layer.padding = LeftPadding([0, 4])
    values = torch.randn(2, 1, 20, width)
    rows, first = layer.update(quantizer.encode(values), values)
    read = layer.with_first(quantizer.decode(rows, torch.float32))[:, 0].double()
    angles = torch.arange(20.0, dtype=torch.float64)[:, None] * frequencies
    rope_key = rotate_pairs(read[:, None, :, rank:], angles.cos(), angles.sin())[:, 0]
    query, starts = torch.randn(2, 2, 4, width, dtype=torch.float64), ints(0, 4)
    expected = ragged_latent_attention(query, read[..., :rank], rope_key, 0.3, starts=starts)
    options = {"exact": first[:, 0].double(), "exact_starts": starts, "starts": starts}
    result = mla_decode_packed(
        query, rows[:, 0].view(torch.int16), quantizer.step, quantizer.mean, 0.3, fields=fields, rank=rank,
        rotation=rotation_tables(frequencies, 20, torch.float64), **options,
    )  # fmt: skip
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_operator_runs_the_kernel(device, caplog):
    arguments = inputs(SHORT, device=device)
    expected = packed_latent_attention(**wide(apart(arguments)))
    for result, want in zip(mla_decode_packed(**arguments), expected, strict=True):
        assert_close("operator", result, want, units=6)
    assert not caplog.records


def test_slots_are_where_the_format_says():
    fields, rank = flat(EVERY)
    table = slot_table(fields, rank, 16, torch.device("cpu")).flatten()
    entries = [entry for entry in table.tolist() if entry >= 0]
    assert len(entries) == TokenFormat(sum(EVERY, ())).channels // 2
    assert table[rank // 2] == -1 and table[-(-rank // 32) * 16] >= 0  # a plane of the latent holds no shared key
    channel = 0
    for first, count, position, bits in TokenFormat(sum(EVERY, ())).fields():
        for byte in range(first, first + count, 2):
            assert entries[channel // 2] == byte // 2 * 256 + (2**bits - 1) * 2**position
            channel += 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_packed_bytes_are_those_of_the_quantizer(dtype, device):
    """Values in range, beyond it, and halfway between two levels."""
    quantizer = TokenQuantizer(TokenFormat((*EVERY[0], ("4+4", 40)))).to(device)
    generator = torch.Generator().manual_seed(0)
    quantizer.step = (0.1 + torch.rand(quantizer.format.channels, generator=generator)).to(device)
    quantizer.mean = torch.randn(quantizer.format.channels, generator=generator).to(device)
    values = 3 * torch.randn(2, 7, quantizer.format.channels, generator=generator).to(device)
    values[0] = quantizer.mean + quantizer.step * torch.arange(-3.5, 3.5, 1.0, device=device)[:, None]
    values[1, 0], values = 1e6, values.to(dtype)
    fields = tuple(chain.from_iterable(quantizer.format.fields()))
    assert torch.equal(pack_rows(values, quantizer.step, quantizer.mean, fields), quantizer.encode(values))
    if device.type == "cpu" and cpu.load() is None:
        on_cpu = torch.ops.surgery_cpu.pack_rows(values, quantizer.step, quantizer.mean, fields)
        assert torch.equal(on_cpu, quantizer.encode(values))


EXAMPLES = {
    "mla_decode_packed": Example(
        mla_decode_packed,
        _mla_decode_packed.registered,
        packed_latent_attention,
        {"query": normal(2, 1, 2, 24), "rows": ints(*range(2 * 8 * 7)).to(torch.int16).view(2, 8, 7), "scale": 0.2}
        | {"step": 0.1 + torch.zeros(24), "mean": torch.zeros(24), "fields": flat(SHORT)[0], "rank": 16}
        | {"lengths": ints(8, 7), "exact": normal(2, 2, 24)},
        [
            ({"fields": (0, 8, 0)}, "fields"),
            ({"rank": 15}, "rank"),
            ({"rows": zeros(2, 8, 7)}, "rows"),
            ({"rows": ints(*range(2 * 8 * 5)).to(torch.int16).view(2, 8, 5)}, "rows"),
            ({"rows": ints(*range(2 * 8 * 10)).to(torch.int16).view(2, 8, 10)}, "gains"),
            ({"step": torch.ones(3)}, "step"),
            ({"rotation": None}, "rotation"),
            ({"exact": zeros(2, 2, 3)}, "exact"),
            ({"starts": torch.tensor([1])}, "starts"),
        ],
        of_function={"rotation": rotation_tables(torch.ones(4), 8)},
        of_operator=dict(zip(("within", "begins"), rotation_tables(torch.ones(4), 8), strict=True)),
    )
}


def no_product(name: str, capability: int, mma: list[str]) -> bool:
    """Tell whether a launch has no matrix instructions: rows are unpacked alone."""
    return not mma


COMPILED = [
    slow(Compiled("compile_mla_decode:packed_cases", no_product)),
    slow(Compiled("compile_mla_decode:unpacked_block_cases", no_product)),
]
