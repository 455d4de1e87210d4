"""What every operation keeps as an operator of PyTorch: registration, gradients, graphs, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from kernel_checks import assert_close
from torch import Tensor

from surgery.kernels.gqa_decode.operator import _gqa_decode, gqa_decode
from surgery.kernels.gqa_decode.reference import grouped_query_attention
from surgery.kernels.gqa_decode_quantized.operator import _quantized, gqa_decode_quantized
from surgery.kernels.gqa_decode_quantized.reference import quantized_attention
from surgery.kernels.hybrid_decode.operator import _hybrid_decode, hybrid_decode
from surgery.kernels.hybrid_decode.reference import hybrid_attention
from surgery.kernels.lowrank_decode.operator import lowrank_decode, lowrank_decode_op, rotation_tables
from surgery.kernels.lowrank_decode.reference import lowrank_attention
from surgery.kernels.mla_decode.operator import _mla_decode, mla_decode
from surgery.kernels.mla_decode.quantized_operator import _mla_decode_quantized, mla_decode_quantized
from surgery.kernels.mla_decode.quantized_reference import quantized_latent_attention
from surgery.kernels.mla_decode.reference import ragged_latent_attention
from surgery.kernels.mla_prefill.operator import _mla_prefill, mla_prefill
from surgery.kernels.mla_prefill.reference import prefill_attention
from surgery.kernels.sink_recent_prefill.operator import _sink_recent_prefill, sink_recent_prefill
from surgery.kernels.sink_recent_prefill.reference import sink_recent_attention
from surgery.model.quantized_cache import GroupedCodes

MADE = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=MADE, dtype=torch.float64)


def ints(*numbers: int | list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def coded(name: str, width: int, heads: int, format: str, group: int, by_channel: bool, names: str) -> dict:
    """Codes, scale and zero of 8 tokens, under the names of an operation; without heads where there are none."""
    tokens = normal(2, max(heads, 1), 8, width)
    codes = GroupedCodes(tokens, format, group, by_channel=by_channel)
    codes.append(tokens)
    made = (codes.codes, codes.scale, codes.zero)
    held = [tensor if heads or tensor is None else tensor[:, 0] for tensor in made]
    return dict(zip((f"{name}{kind}" for kind in names.split()), held, strict=True))


@dataclass(frozen=True)
class Example:
    """A call of an operation in float64.

    Attributes:
        given: arguments by name, of the function, the registered operator and the reference alike.
        of_function, of_operator: those that only the one or the others have.
        settings: those of the operator that the reference has no use for.
        refused: changes of the function's arguments, and what is said of them.
    """

    function: Callable
    operator: Callable
    reference: Callable
    given: dict
    refused: list[tuple[dict, str]]
    of_function: dict = field(default_factory=dict)
    of_operator: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    def arguments(self, dtype: torch.dtype, device: torch.device, gradients: bool = False) -> dict:
        """Of operator and reference; with gradients every floating-point tensor but scales and tables wants one."""
        found = {}
        for name, value in (self.given | self.of_operator).items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None, copy=True)
                value.requires_grad_(gradients and value.is_floating_point() and name in LEAVES)
            found[name] = value
        return found


LEAVES = {"query", "key", "value", "full_key", "full_value", "streaming_key", "streaming_value", "latent", "rope_key"}
LEAVES |= {"key_gain", "key_up", "exact_key", "exact_value"}
WITHIN, BEGINS = rotation_tables(10.0 ** -torch.arange(2.0), 9, torch.float64)
EXAMPLES = {
    "gqa_decode": Example(
        gqa_decode,
        _gqa_decode,
        grouped_query_attention,
        {"query": normal(2, 2, 4, 6), "key": normal(2, 2, 7, 6), "value": normal(2, 2, 7, 5), "scale": 0.4}
        | {"lengths": ints(7, 1), "starts": ints(2, 0), "window": 4},
        [
            ({"key": zeros(2, 3, 7, 6)}, "values"),
            ({"query": zeros(2, 2, 5, 6)}, "5 query heads do not follow 2 KV heads"),
            ({"query": zeros(2, 2, 4, 8)}, "do not belong together"),
            ({"query": zeros(3, 2, 4, 6)}, "3 rows"),
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
        _gqa_decode,
        grouped_query_attention,
        {"query": normal(2, 2, 4, 6), "key": normal(5, 2, 4, 6), "value": normal(5, 2, 4, 5), "scale": 0.4}
        | {"pages": ints([3, 1], [0, 4])},
        [],
        settings={"splits": 2},
    ),
    "gqa_decode_quantized": Example(
        gqa_decode_quantized,
        _quantized,
        quantized_attention,
        {"query": normal(2, 1, 4, 16), "scale": 0.3, "format": "int4", "group": 8, "keys": "channel", "behind": 0}
        | {"lengths": ints(9, 3)}
        | coded("key", 16, 2, "int4", 8, True, "_codes _scale _zero")
        | coded("value", 16, 2, "int4", 8, False, "_codes _scale _zero"),
        [
            ({"format": "int3"}, "int3"),
            ({"keys": "head"}, "head"),
            ({"group": 5}, "whole groups"),
            ({"key_scale": zeros(2, 2, 3, 16)}, "scales of keys"),
            ({"value_scale": zeros(2, 2, 8, 0)}, "scales of values"),
            ({"key_zero": None}, "zero points of keys"),
            ({"value_zero": zeros(2, 2, 8, 3)}, "zero points of values"),
            ({"value_scale": zeros(2, 2, 8, 1).half(), "value_zero": zeros(2, 2, 8, 1).half()}, "float16"),
            ({"key_codes": zeros(2, 2, 4, 16)}, "uint8"),
            ({"coded": zeros(2)}, "coded"),
            ({"behind": -1}, "behind"),
        ],
    ),
    "hybrid_decode": Example(
        hybrid_decode,
        _hybrid_decode,
        hybrid_attention,
        {"query": normal(2, 2, 4, 8), "scale": 0.3, "sink_slots": 1, "sinks": 1, "recent": 4}
        | {"full_key": normal(2, 1, 10, 8), "full_value": normal(2, 1, 10, 8)}
        | {"streaming_key": normal(2, 1, 6, 8), "streaming_value": normal(2, 1, 6, 8)}
        | {"lengths": ints(4, 9), "starts": ints(0, 1)},
        [
            ({"query": zeros(2, 2, 7, 8)}, "7 query heads do not follow 2 KV heads"),
            ({"streaming_key": zeros(2, 1, 6, 4)}, "keys .* and values"),
            ({"full_value": zeros(2, 1, 10, 8).half()}, "full_value is torch.float16"),
            ({"lengths": torch.tensor([1, 2])}, "lengths is torch.int64"),
            ({"sink_slots": 2}, "2 of 6 slots for 1 sinks"),
            ({"query": zeros(2, 6, 4, 8)}, "5 slots of the window for 6 new tokens"),
            ({"splits": 0}, "splits of 0"),
        ],
    ),
    "sink_recent_prefill": Example(
        sink_recent_prefill,
        _sink_recent_prefill,
        sink_recent_attention,
        {"query": normal(2, 2, 9, 8), "key": normal(2, 2, 9, 8), "value": normal(2, 2, 9, 8), "scale": 0.3}
        | {"sinks": ints(1, 0), "recent": ints(-1, 3), "starts": ints(0, 2)},
        [
            ({"query": zeros(2, 7, 9, 8)}, "7 query heads do not follow 2 KV heads"),
            ({"query": zeros(2, 2, 10, 8)}, "10 queries of a text of 9 tokens"),
            ({"key": zeros(2, 2, 8, 8)}, "do not belong together"),
            ({"value": zeros(2, 2, 9, 8).half()}, "one dtype is needed"),
            ({"recent": zeros(2)}, "recent is torch.float64"),
            ({"starts": ints(1, 1, 1)}, r"int32 \[2\] is needed"),
        ],
    ),
    "mla_decode": Example(
        mla_decode,
        _mla_decode,
        ragged_latent_attention,
        {"query": normal(2, 2, 4, 10), "latent": normal(2, 9, 8), "rope_key": normal(2, 9, 2), "scale": 0.2}
        | {"lengths": ints(9, 7), "key_gain": normal(2, 9, 2), "window": 5},
        [
            ({"query": zeros(2, 2, 4, 9)}, "numbers"),
            ({"rope_key": zeros(2, 8, 2)}, "other tokens"),
            ({"query": zeros(1, 2, 4, 10)}, "rows"),
            ({"query": zeros(2, 2, 4, 10).half()}, "one dtype"),
            ({"lengths": torch.tensor([3, 4])}, "lengths"),
            ({"window": 0}, "window"),
            ({"pages": ints(0, 1)}, "pages"),
            ({"key_gain": zeros(2, 9, 3)}, "no multiple"),
        ],
    ),
    "mla_decode_quantized": Example(
        mla_decode_quantized,
        _mla_decode_quantized,
        quantized_latent_attention,
        {"query": normal(2, 1, 2, 20), "scale": 0.2, "format": "int8", "group": 8, "by_channel": True, "window": 11}
        | {"lengths": ints(10, 7)}
        | coded("", 16, 0, "int8", 8, True, "codes scales zeros")
        | coded("rope_", 4, 0, "int8", 8, False, "codes scales zeros"),
        [
            ({"format": "int3"}, "format"),
            ({"format": "int4", "group": 3}, "group of 3"),
            ({"group": 4}, "scales"),
            ({"by_channel": False}, "scales"),
            ({"zeros": None}, "zeros"),
            ({"codes": zeros(2, 8, 16, dtype=torch.int32)}, "uint8"),
            ({"query": zeros(2, 1, 2, 19)}, "query"),
            ({"coded": torch.tensor([1])}, "coded"),
        ],
    ),
    "mla_decode_quantized in fp8": Example(
        mla_decode_quantized,
        _mla_decode_quantized,
        quantized_latent_attention,
        {"query": normal(2, 1, 2, 20), "scale": 0.2, "format": "fp8", "group": 8, "by_channel": True}
        | coded("", 16, 0, "fp8", 8, True, "codes scales zeros")
        | coded("rope_", 4, 0, "fp8", 8, False, "codes scales zeros"),
        [],
    ),
    "mla_prefill": Example(
        mla_prefill,
        _mla_prefill,
        prefill_attention,
        {"query": normal(1, 2, 3, 8), "key": normal(1, 1, 5, 8), "value": normal(1, 1, 5, 4), "scale": 0.3}
        | {"starts": ints(1), "window": 3},
        [
            ({"query": zeros(1, 2, 6, 8)}, "6 queries over 5 slots"),
            ({"starts": torch.zeros(1, dtype=torch.long)}, "starts is"),
            ({"causal": False}, "window"),
        ],
    ),
    "mla_prefill of wide heads": Example(
        mla_prefill,
        _mla_prefill,
        prefill_attention,
        {"query": normal(1, 2, 2, 320), "key": normal(1, 1, 2, 320), "value": normal(1, 1, 2, 8), "scale": 0.3},
        [],
    ),
    "lowrank_decode": Example(
        lowrank_decode,
        lowrank_decode_op,
        lowrank_attention,
        {"query": normal(1, 2, 4, 4), "latent": normal(1, 9, 6), "key_up": normal(2, 4, 6), "scale": 0.25}
        | {"key_bias": normal(2, 4), "norm_weight": normal(4), "norm_eps": 1e-6, "raw_exact": True}
        | {"exact_key": normal(1, 2, 3, 4), "exact_value": normal(1, 2, 3, 5), "exact_slots": ints([8, 7, 0])}
        | {"lengths": ints(9), "window": 2, "sinks": 1},
        [
            ({"query": zeros(1, 2, 4, 2)}, "4 query heads of 2 numbers"),
            ({"latent": zeros(1, 9, 5), "ranges": None}, "give `ranges`"),
            ({"ranges": [(0, 6, 0, 6), (1, 6, 0, 6)]}, "within 6 and 6"),
            ({"lengths": ints(9, 9)}, r"lengths must be \[1\]"),
            ({"exact_key": None}, "exact tokens need"),
            ({"rebuilt": ints([0, 5]), "lengths": None}, "needs `lengths`"),
            ({"window": -1}, "a window of -1"),
        ],
        of_function={"rotation": (WITHIN, BEGINS), "ranges": [(0, 6, 1, 4)] * 2},
        of_operator={"within": WITHIN, "begins": BEGINS, "ranges": [0, 6, 1, 4] * 2},
    ),
}

every = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
SCHEMAS = ("test_schema", "test_faketensor", "test_autograd_registration")


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pytorch_knows_the_operator(example, dtype, device):
    arguments = example.arguments(dtype, device, gradients=True)
    # A backward pass of its own is looked at, too.
    tests = {"test_utils": SCHEMAS} if example.operator is not _mla_prefill else {}
    torch.library.opcheck(example.operator, (), arguments | example.settings, **tests)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_the_reference(example, dtype, device):
    found = []
    for function, width, settings in (
        (example.operator, dtype, example.settings),
        (example.reference, torch.float64, {}),
    ):
        arguments = example.arguments(width, device, gradients=True)
        leaves = [value for value in arguments.values() if isinstance(value, Tensor) and value.requires_grad]
        out, lse = function(**arguments, **settings)
        result = out.square().sum() + lse[lse.isfinite()].sum()
        found.append(torch.autograd.grad(result, leaves))
    for got, expected in zip(*found, strict=True):
        assert expected.abs().max() > 0
        if dtype == torch.float64:
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        else:
            assert_close("gradient", got, expected)


@every
def test_gradients_are_differences(example, device):
    arguments = example.arguments(torch.float64, device, gradients=True)
    leaves = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad}

    def out(*values):
        return example.operator(**arguments | dict(zip(leaves, values, strict=True)))[0]

    # Every derivative of one operation, of the others their projections on random directions.
    fast = example is not EXAMPLES["gqa_decode"]
    assert torch.autograd.gradcheck(out, tuple(leaves.values()), fast_mode=fast)


@every
def test_it_compiles_into_one_graph(example, device):
    given = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in (example.given | example.of_function | example.settings).items()
    }

    def step(query, rest):
        out, *_, lse = example.function(query=query * 2, **rest)
        return out + 1, lse

    query = given.pop("query")
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(query, given), step(query, given), strict=True):
        assert torch.equal(got, expected)


REFUSED = [(name, *refused) for name, example in EXAMPLES.items() for refused in example.refused]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[f"{name}: {what}" for name, _, what in REFUSED])
def test_what_does_not_belong_together_is_refused(name, change, message):
    example = EXAMPLES[name]
    with pytest.raises(ValueError, match=message):
        example.function(**example.given | example.of_function | change)
