"""Plans: what is worked out once for a call is right for every call of its key, and a growing text keeps to few."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_examples import ints
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.kernels import plan
from surgery.kernels.lowrank_decode.operator import lowrank_decode, rotation_tables
from surgery.kernels.mla_decode.operator import _mla_decode, mla_decode
from surgery.kernels.mla_decode.packed_operator import mla_decode_packed
from surgery.kernels.split_kv import split_count
from surgery.kernels.unpack_rows.operator import unpack_rows

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SIZES = [1, 2, 5, 16, 17, 32, 33, 100, 112, 511, 512, 513, 700, 1023, 1024, 1025, 1100, 1504, 2048, 2060]


def normal(*shape):
    return torch.randn(*shape)


def view(tensor, dim):
    """The first tokens of a larger buffer."""
    larger = tensor.new_zeros(*tensor.shape[:dim], tensor.shape[dim] + 24, *tensor.shape[dim + 1 :])
    return larger.narrow(dim, 0, tensor.shape[dim])


def lowrank(tokens):
    rotation = rotation_tables(10.0 ** -torch.arange(4.0), tokens)
    return lowrank_decode(normal(2, 1, 4, 8), normal(2, tokens, 12), normal(2, 8, 12), 0.3, rotation=rotation)


def packed(tokens):
    options = {"fields": (0, 8, 0, 4, 0, 8, 4, 4, 8, 8, 0, 8), "rank": 16, "exact": normal(2, 2, 24)}
    rows, scales = torch.zeros(2, tokens, 8, dtype=torch.int16), torch.ones(24)
    rotation = rotation_tables(10.0 ** -torch.arange(4.0), tokens)
    return mla_decode_packed(normal(2, 1, 4, 24), rows, scales, scales.clone(), 0.3, rotation=rotation, **options)


def to_pages(tokens):
    fields, table = (0, 8, 0, 4, 0, 8, 4, 4, 8, 8, 0, 8), pages(tokens)
    rows, scales, memory = torch.zeros(9, 16, 8, dtype=torch.int16), torch.ones(24), torch.zeros(9, 16, 24)
    rotation = rotation_tables(10.0 ** -torch.arange(4.0), 16 * table.shape[1])
    settings = {"fields": fields, "lengths": ints(1, tokens), "pages": table, "rotation": rotation}
    unpack_rows(rows, scales, scales.clone(), memory[..., :16], memory[..., 16:], exact=normal(2, 2, 24), **settings)


def pages(tokens):
    return torch.zeros(2, -(-tokens // 16), dtype=torch.int32)


STEPS = {
    "mla": lambda n: mla_decode(normal(2, 1, 4, 12), normal(2, n, 8), normal(2, n, 4), 0.3, lengths=ints(1, n)),
    "mla with gains": lambda n: mla_decode(
        normal(2, 2, 4, 12), normal(2, n, 8), normal(2, n, 4), 0.3, key_gain=normal(2, n, 2)
    ),
    "mla in a buffer": lambda n: mla_decode(
        normal(2, 1, 4, 12), view(normal(2, n, 8), 1), view(normal(2, n, 4), 1), 0.3
    ),
    "mla in pages": lambda n: mla_decode(normal(2, 1, 4, 12), normal(9, 16, 8), normal(9, 16, 4), 0.3, pages=pages(n)),
    "mla transposed": lambda n: mla_decode(
        normal(2, 1, 4, 12), normal(n, 2, 8).transpose(0, 1), normal(n, 2, 4).transpose(0, 1), 0.3, starts=ints(0, 1)
    ),
    "mla in rows": packed,
    "rows to pages": to_pages,
    "low rank": lowrank,
}


@pytest.fixture
def launched(monkeypatch):
    """Launches instead of running them: kernel, grid and arguments, memory by its shape and dtype."""
    launches = []

    class Recorder:
        def __init__(self, launch):
            self.launch = launch

        def start(self, *arguments):
            values = [describe(value) for value in arguments]
            launches.append((self.launch.kernel, self.launch.grid, values, self.launch.warps, self.launch.stages))

    def describe(value):
        return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else (type(value), value)

    monkeypatch.setattr(plan, "_Starter", Recorder)
    plan.forget_plans()
    yield launches
    plan.forget_plans()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_plan_of_another_length_launches_the_same(step, launched):
    """Sizes and strides are read from each call: with all plans of shorter texts known, as with none."""
    for size in SIZES:
        launched.clear()
        step(size)
        reference = list(launched)
        caches = [dict(cache) for cache in plan._caches]
        plan.forget_plans()
        launched.clear()
        step(size)
        assert reference == launched and reference, size
        for cache, entries in zip(plan._caches, caches, strict=True):
            cache.clear()
            cache.update(entries)


def test_a_text_that_grows_by_300_tokens_compiles_and_plans_rarely():
    """After its first step: where the splits change, one kernel for parts and one that merges them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(SUPPORT.parents[1]), str(SUPPORT)))}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "growing_texts.py"), "300", "700", "900"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    for begin, limit in (("700", 0), ("900", 2)):
        for name, counts in json.loads(process.stdout)[begin].items():
            assert counts["plans"] <= 12, (begin, name, counts)
            assert len(counts["compilations"]) <= limit, (begin, name, counts)


@pytest.mark.parametrize("processors", [1, 78, 132])
def test_splits_change_at_powers_of_two_only(processors):
    for tokens in range(1, 5000):
        least = 1 << (tokens.bit_length() - 1)
        assert split_count(3, tokens, processors) == split_count(3, least, processors)


def test_sizes_that_differ_are_refused_with_a_plan_of_equal_ones(launched):
    query, latent, rope_key = normal(2, 1, 4, 12), normal(2, 600, 8), normal(2, 600, 4)
    mla_decode(query, latent, rope_key, 0.3)
    for other in (599, 601, 610):
        with pytest.raises(ValueError, match="must hold the same tokens"):
            mla_decode(query, latent, normal(2, other, 4), 0.3)


def test_one_tensor_twice_is_no_plan_for_two(device):
    query, latent, rope_key = (normal(*shape).to(device) for shape in ((1, 1, 2, 32), (1, 20, 16), (1, 20, 16)))
    plan.forget_plans()
    mla_decode(query, latent, latent, 0.3)
    reference = mla_decode(query, latent, rope_key, 0.3)
    plan.forget_plans()
    assert all(map(torch.equal, reference, mla_decode(query, latent, rope_key, 0.3)))


def test_a_plan_keeps_no_tensors_of_its_first_call_alive(device):
    latent = normal(1, 64, 16).to(device)
    address = latent.data_ptr()
    mla_decode(normal(1, 1, 4, 16).to(device), latent, normal(1, 64, 0).to(device), 0.3)
    assert _mla_decode._plans
    del latent
    assert not [each for each in gc.get_objects() if type(each) is Tensor and each.data_ptr() == address]


def test_results_are_contiguous(device):
    out, log = mla_decode(normal(3, 2, 4, 20).to(device), normal(3, 9, 16).to(device), normal(3, 9, 4).to(device), 0.3)
    assert out.is_contiguous() and log.is_contiguous() and out.shape == (3, 2, 4, 16)


class Marked(Tensor):
    """A subclass of tensors."""


@pytest.fixture
def arguments():
    return normal(1, 1, 2, 12), normal(1, 5, 8), normal(1, 5, 4)


def test_nothing_but_a_plan_is_run_where_nobody_looks(arguments, launched, monkeypatch):
    monkeypatch.setattr(_mla_decode, "registered", None)
    mla_decode(*arguments, 0.3)
    assert launched
    with torch.no_grad():
        mla_decode(arguments[0].requires_grad_(), *arguments[1:], 0.3)
    with torch.inference_mode():
        mla_decode(*arguments, 0.3)
    assert len(launched) == 3


def test_gradients_modes_transforms_and_subclasses_see_the_operator(arguments):
    query, *cached = arguments
    assert mla_decode(query.clone().requires_grad_(), *cached, 0.3)[0].grad_fn is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(mla_decode(query, *cached, 0.3)[0], FakeTensor)
    calls = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with Watcher():
        mla_decode(query, *cached, 0.3)
    assert torch.ops.surgery.mla_decode.default in calls
    # PyTorch transforms no operator of this kind: it says so.
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda query: mla_decode(query, *cached, 0.3)[0].sum())(query)
    assert mla_decode(query.as_subclass(Marked), *cached, 0.3)[0].shape == (1, 1, 2, 8)
    out, log = mla_decode(*(tensor.to("meta") for tensor in arguments), 0.3)
    assert out.is_meta and out.shape == (1, 1, 2, 8) and log.shape == (1, 1, 2)


def test_plans_are_few_and_can_be_forgotten(launched, monkeypatch):
    monkeypatch.setattr(plan, "MOST_PLANS", 3)
    for tokens in (2, 5, 9, 17, 33):
        mla_decode(normal(1, tokens % 3 + 1, 2, 6), normal(1, tokens, 4), normal(1, tokens, 2), 0.3)
        assert 1 <= len(_mla_decode._plans) <= 3 and 1 <= len(_mla_decode._calls) <= 3
    plan.forget_plans()
    assert not _mla_decode._plans and not _mla_decode._calls
