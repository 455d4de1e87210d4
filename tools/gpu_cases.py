"""Benchmark cases of a GPU run as tests for ``pytest -p gpu_compile``, which compiles their kernels in advance.

SURGERY_CASES has five fields separated by spaces: kernel shapes, contexts, batches, model shape, and forms to decode;
items are separated by commas: ``llama3-8b,smollm2 4k,32k 1,32,128 llama3-8b mla,gqa``.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
import torch

from surgery.kernels.bench.registry import OPERATIONS, cases
from surgery.kernels.bench.sizes import numbers

SHAPES, CONTEXTS, BATCHES, MODEL, FORMS = os.environ["SURGERY_CASES"].split()
OPERATION_NAMES = [name for name in os.environ.get("SURGERY_OPERATIONS", ",".join(OPERATIONS)).split(",") if name]
GROUPS = defaultdict(list)
for _case in cases(OPERATION_NAMES, SHAPES.split(","), numbers(CONTEXTS), numbers(BATCHES), [torch.bfloat16]):
    GROUPS[f"{_case.operation} {_case.model} {_case.variant}"].append(_case)


@pytest.fixture
def memory(monkeypatch):
    """Replace random tensors by uninitialized ones: kernels do not run, and untouched memory takes no RAM."""

    def empty(*sizes, dtype=torch.float32, **_):
        return torch.empty(*sizes, dtype=dtype)

    monkeypatch.setattr(torch, "randn", empty)
    monkeypatch.setattr(torch, "randint", lambda *bounds, dtype=torch.int64, **_: torch.empty(bounds[-1], dtype=dtype))
    monkeypatch.setattr(torch, "rand", empty)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_kernel(group, memory):
    """Compile all batches and contexts of one variant, which share most of their kernels."""
    for case in GROUPS[group]:
        case.run(case.inputs(torch.device("cpu"), 0))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [name for name in ("source", *FORMS.split(",")) if name != "-"])
@torch.no_grad()
def test_model(form):
    """Compile one narrow layer with the heads of the model; attention kernels do not depend on the hidden size."""
    # Imported here, since kernel cases do not need transformers, which is slow to import.
    from surgery.acceleration.accelerate import accelerate
    from surgery.acceleration.comparison import step_error
    from surgery.bench.decode import _measure
    from surgery.bench.models import converted_configs, random_model, source_config

    config = source_config(MODEL)
    narrow = {"head_dim": config.head_dim, "hidden_size": 256, "intermediate_size": 64, "vocab_size": 128}
    config = type(config)(**{**config.to_dict(), **narrow, "num_hidden_layers": 1})
    rank, rope_dim = (24, 8) if MODEL == "tiny" else (512, 64)
    if form != "source":
        config = converted_configs()[form](config, rank, rope_dim)
    device = torch.device("cpu")
    model = random_model(config, device)
    accelerate(model, compare=False)
    step_error(model, None)
    for context in numbers(CONTEXTS)[:1]:
        for batch in (1, 2):
            _measure(model, batch, context, device)
