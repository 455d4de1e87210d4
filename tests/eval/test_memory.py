import json
import sys

import pytest
import torch
from measures import refuse_above
from tiny_models import CONFIGS, DEMO
from torch import nn
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval import peak_memory
from surgery.eval.memory import OutOfMemory, unless_out_of_memory
from surgery.eval.peak_memory import PeakMemory
from surgery.eval.session import Session
from surgery.eval.tasks.memory import MemoryTask
from surgery.eval.tensor_bytes import weight_bytes
from surgery.running.processes import Processes

SESSION = Session(None, Processes(cpu=True), Progress(silent=True))
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks of a CPU are measured on Linux only")


def tiny(family: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(CONFIGS[family]())


def test_tied_weights_count_once():
    tied, untied = tiny("llama"), tiny("mistral")
    embedding = 4096 * 32 * 4
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    buffers = sum(buffer.nbytes for buffer in tied.buffers())
    assert weight_bytes(tied) == sum(parameter.nbytes for parameter in tied.parameters()) + buffers
    assert weight_bytes(untied) == weight_bytes(tied) + embedding


def test_weights_are_measured_in_their_own_dtype():
    assert weight_bytes(nn.Linear(8, 4).to(torch.bfloat16)) == (8 * 4 + 4) * 2


@linux
def test_peaks_hold_the_cache_and_what_is_freed_again():
    meter = PeakMemory(nn.Linear(1, 1))
    with meter.phase() as kept:
        held = torch.ones(40 << 20, dtype=torch.uint8)
    with meter.phase() as freed:
        torch.ones(60 << 20, dtype=torch.uint8)
    with meter.phase() as quiet:
        pass
    slack = 8 << 20
    assert held.nbytes <= kept.peak + slack and kept.peak < held.nbytes + slack
    assert abs(freed.peak - (100 << 20)) < slack
    assert abs(quiet.peak - (40 << 20)) < slack
    meter.zero()
    with meter.phase() as zeroed:
        pass
    assert zeroed.peak < slack


@linux
def test_what_an_earlier_phase_freed_does_not_count():
    meter = PeakMemory(nn.Linear(1, 1))
    with meter.phase() as first:
        blocks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(640)]
    last = blocks.pop()  # keeps the allocator from shrinking its heap by itself
    del blocks
    with meter.phase() as second:
        pass
    assert first.peak > 32 << 20 > 4 * second.peak
    assert last.nbytes == 64 << 10


def test_where_peaks_cannot_be_measured_the_report_says_why(monkeypatch):
    monkeypatch.setattr(peak_memory, "_peak_can_be_reset", lambda: False)
    result = MemoryTask((8,)).run(tiny("llama"), SESSION)
    assert result["contexts"][0]["peak_prefill_bytes"] is result["contexts"][0]["peak_decode_bytes"] is None
    assert result["contexts"][0]["cache_bytes"] == 8 * 2 * 2 * (2 * 8) * 4
    assert "does not let a process reset its peak" in result["how"]


@linux
@pytest.mark.slow
def test_the_demo_model():
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    result = MemoryTask((2304, 128)).run(model, SESSION)
    assert json.loads(json.dumps(result)) == result
    per_token = 6 * 2 * (4 * 32) * 2  # layers, K and V, KV heads of 32, bfloat16
    assert (result["bytes_per_token"], result["growth_per_token"]) == (per_token, per_token)
    assert (result["dtype"], result["device"]) == ("bfloat16", "cpu")
    small, large = result["contexts"]
    assert (small["context"], large["context"]) == (128, 2304)
    assert large["cache_bytes"] == 2304 * per_token
    assert large["peak_prefill_bytes"] > large["cache_bytes"]
    assert large["peak_decode_bytes"] > large["cache_bytes"]
    assert small["note"] is None
    assert large["note"] == "beyond the model's 2048 positions"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), marks=pytest.mark.slow),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"),
        pytest.param(MemoryError(), marks=pytest.mark.slow),
    ],
)
def test_a_context_that_does_not_fit(error):
    model = tiny("llama")
    refuse_above(model, 100, error)
    result = MemoryTask((80, 200, 300)).run(model, SESSION)
    assert [row["note"] for row in result["contexts"]] == [None, "out of memory", "not tried: out of memory at 200"]
    assert [row["cache_bytes"] for row in result["contexts"]] == [80 * 256, None, None]
    assert result["bytes_per_token"] == 256
    refuse_above(model, 0, error)
    nothing = MemoryTask((80,)).run(model, SESSION)
    assert nothing["bytes_per_token"] is nothing["growth_per_token"] is None
    assert json.loads(json.dumps(nothing)) == nothing


def test_a_real_refusal_of_the_allocator_is_told():
    assert isinstance(unless_out_of_memory(lambda: torch.empty(1 << 60, dtype=torch.uint8)), OutOfMemory)
    assert unless_out_of_memory(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="shape"):
        unless_out_of_memory(lambda: torch.zeros(2) @ torch.zeros(3, 3))


@pytest.mark.parametrize("arguments", [{"contexts": ()}, {"contexts": (1,)}, {"contexts": (8,), "batch": 0}])
def test_impossible_requests(arguments):
    with pytest.raises(SurgeryError, match="at least one context, of at least 2 tokens"):
        MemoryTask(**arguments)


def test_settings_decide_the_result():
    assert MemoryTask((64, 8, 8), batch=2).settings() == {"contexts": [8, 64], "batch": 2}
    result = MemoryTask((8,), batch=2).run(tiny("mistral_window"), SESSION)
    assert result["contexts"][0]["cache_bytes"] == 2 * 8 * 256
