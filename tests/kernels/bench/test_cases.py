"""Benchmarks of kernels: cases, their work, and other implementations of the same, on a CPU at tiny shapes."""

import dataclasses

import pytest
import torch

from surgery.kernels.bench import gate
from surgery.kernels.bench.case import MODELS
from surgery.kernels.bench.registry import OPERATIONS, cases
from surgery.kernels.bench.sizes import DEFAULTS, TINY, numbers

CPU = torch.device("cpu")
TINY_CASES = cases(OPERATIONS, ["tiny"], [63], [3], [torch.float32])
BY_HAND = {
    # cached bytes, FLOPs of the products, at 1 x 1024 tokens of bf16
    "mla_decode": (1024 * 576 * 2, 2 * 1024 * 32 * (2 * 512 + 64)),
    "sdpa": (1024 * 8 * 256 * 2, 4 * 1024 * 32 * 128),
    "lowrank_decode": (1024 * 512 * 2, 2 * 1024 * (8 * 64 * 128 + 32 * (128 + 64))),
    "mla_decode_packed": (1024 * 320 + 4 * 640 * 2, 2 * 1024 * 32 * (2 * 512 + 128)),
}


def first(operation, model="llama3-8b", context=1024, batch=1, dtype=torch.bfloat16):
    return cases([operation], [model], [context], [batch], [dtype])[0]


@pytest.mark.parametrize("operation", BY_HAND)
def test_work_by_hand(operation):
    case = first(operation)
    assert (case.cache_bytes, case.flops) == BY_HAND[operation]
    assert case.bytes == case.cache_bytes + case.query_bytes


@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: f"{case.operation} {case.variant}")
def test_every_case_passes_its_gate(case):
    result = gate.check(case, case.inputs(CPU, 0), baselines=False)
    assert result.passed, result.reasons
    assert result.bit_equal and result.error <= result.tolerance


@pytest.mark.parametrize("operation", ("mla_decode", "lowrank_decode"))
def test_libraries_compute_the_same(operation):
    case = first(operation, "tiny", 63, 3, torch.float32)
    result = gate.check(case, case.inputs(CPU, 0))
    assert result.library_errors and max(result.library_errors.values()) < 1e-5
    assert result.to_dict()["times_best_library"] > 0


def test_sdpa_backends_that_there_are_not_are_named_with_their_reason():
    case = first("sdpa", "tiny", 40, 1, torch.float32)
    result = gate.check(case, case.inputs(CPU, 0))
    assert result.passed
    assert set(result.refused) | set(result.library_errors) == {"SDPA cuDNN", "SDPA Flash", "SDPA efficient"}
    assert "SDPA cuDNN" in result.refused


@dataclasses.dataclass(frozen=True)
class Broken(type(first("mla_decode", "tiny", 63, 3, torch.float32))):
    """An `mla_decode` with something wrong."""

    fault: str = ""

    def run(self, inputs):
        out = super().run(inputs)
        if inputs["query"].dtype == torch.float64:
            return out
        if self.fault == "inexact":
            out = out * 1.001
        elif self.fault == "unwritten":
            out = torch.cat((out[:, :, :-1], torch.empty_like(out[:, :, -1:])), dim=2)
        elif self.fault == "moving":
            out = out + 1e-7 * out * torch.randn_like(out)
        elif self.fault == "raises":
            raise RuntimeError("out of resource:\n shared memory")
        return out


@pytest.mark.parametrize("fault", ("inexact", "unwritten", "moving", "raises"))
def test_what_is_wrong_does_not_pass(fault):
    right = first("mla_decode", "tiny", 63, 3, torch.float32)
    plain = {field.name: getattr(right, field.name) for field in dataclasses.fields(right)}
    result = gate.check(Broken(**plain, fault=fault), right.inputs(CPU, 0), baselines=False)
    assert not result.passed and result.to_dict()["passed"] is False
    assert Broken(**plain).run(right.inputs(CPU, 0)).isfinite().all()
    if fault == "moving":
        assert result.reasons == ["results of two runs differ"]
    if fault == "raises":
        assert result.reasons == ["RuntimeError: out of resource: shared memory"]


def test_worse_than_twice_the_best_library_does_not_pass():
    result = gate.Gate(error=3e-3, tolerance=1e-2, bit_equal=True, library_errors={"one": 2e-3, "other": 1e-3})
    assert list(gate._reasons(result)) == ["relative error 3.0e-03, 3.0 times that of other"]
    result.error = 1.9e-3
    assert list(gate._reasons(result)) == []


def test_operations_take_turns_and_the_largest_come_first():
    result = cases(["mla_decode", "sdpa"], ["llama3-8b"], [1024, 4096], [1, 8], [torch.bfloat16])
    assert [case.operation for case in result[:4]] == ["mla_decode", "sdpa"] * 2
    sizes = [case.batch * case.context for case in result if case.operation == "sdpa"]
    assert sizes == sorted(sizes, reverse=True)
    for plan in (DEFAULTS, TINY):
        assert set(plan.models) <= set(MODELS)


def test_unknown_names_and_sizes():
    with pytest.raises(ValueError, match="unknown operation 'mla'; choose from lowrank_decode, "):
        cases(["mla"], ["tiny"], [8], [1], [torch.float32])
    with pytest.raises(ValueError, match="unknown shape 'gpt'"):
        cases(["mla_decode"], ["gpt"], [8], [1], [torch.float32])
    assert numbers("8k,100, 2K") == [8192, 100, 2048]
    with pytest.raises(ValueError, match="'8x'"):
        numbers("8x")
