"""mlx-lm, whose backend for CPUs is prebuilt for Linux too, runs what conversions write."""

import json

import pytest
from engine_cases import NEW_TOKENS, PROMPTS, Case, assert_same, run

from surgery.engines.facts import Facts
from surgery.engines.trials import MLX, MLX_DIFFERS

pytestmark = pytest.mark.engines

HEADS = {"kv_heads": 1}
CASES = [
    Case("mla", "llama", {"engine": "mlx", "kv_ratio": 0.5}),
    Case("mla", "mistral", {"engine": "mlx", "kv_ratio": 0.5}),
    Case("mla", "llama_wide", {"engine": "vllm", "kv_lora_rank": 512, "rope_dim": 64}),
    *(Case("llama", name, HEADS) for name in ("llama", "llama3", "llama_bias", "phi3")),
    *(Case(name, name, HEADS) for name in ("mistral", "qwen2", "smollm3", "granite", "glm4", "cohere", "stablelm")),
    *(Case(name, name, HEADS) for name in ("seed_oss", "gemma2", "ministral3", "mixtral")),
]
OTHERS = [
    Case("glm", "glm", HEADS),
    *(Case(f"{name} with a window", f"{name}_window", HEADS) for name in ("mistral", "qwen2", "gemma2")),
]


def generate(path, folder):
    return run("mlx", "run_mlx.py", {"model": str(path), "prompts": PROMPTS, "new_tokens": NEW_TOKENS}, folder)


def facts_of(path) -> Facts:
    return Facts.of(json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_tokens_as_transformers(case, tmp_path):
    path = case.make(tmp_path)
    result = generate(path, tmp_path)
    assert "error" not in result, result["error"]
    assert_same(result, path, PROMPTS, tolerance=1e-3)
    facts = facts_of(path)
    assert facts.kind == case.kind and sum(result["cached"]) == facts.cached_numbers


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_what_is_refused_computes_something_else(case, tmp_path):
    path = case.make(tmp_path)
    result = generate(path, tmp_path)
    assert "error" not in result and facts_of(path).kind == case.kind
    with pytest.raises(AssertionError):
        assert_same(result, path, PROMPTS, tolerance=1e-3)


def test_every_kind_that_is_said_to_load_has_a_case():
    assert {case.kind for case in CASES} == MLX.kinds
    assert {case.kind for case in OTHERS} == set(MLX_DIFFERS)
