"""Decode steps of MLA by the project's kernels in vLLM's CPU build, in Triton's interpreter: transformers' tokens."""

import re
from pathlib import Path

import pytest
from engine_cases import LONG, NEEDS_VLLM, PROMPTS, SHARED, assert_as_transformers, environment, run
from own_checkpoints import IN_BITS, SOURCES, TWO_STEPS, make

pytestmark = NEEDS_VLLM

NEW_TOKENS = 20
PLAIN = ("llama", "llama_bias", "qwen3", "qwen3_mla_low_rank")
"""Ranks by layer and gains of a key norm, and next to a layer of low rank."""
ROWS = ("llama_rows", "mistral_rows", "qwen3_rows", "llama_head_rows", "qwen3_head_rows")
"""Without first tokens, with gains, and with queries that are rotated as heads."""
BLOCKS = {"llama in blocks of 24": ("llama", 24), "qwen3_rows in blocks of 64": ("qwen3_rows", 64)}
KERNELS = {False: {"mla_decode_kernel"}, True: {"mla_decode_kernel", "pack_rows_kernel", "unpack_rows_kernel"}}
"""Names of kernels: MLA's, and those of MLA in bits."""


def requests(folders: dict[str, Path]) -> dict[str, dict]:
    def of(name: str, rounds: list = (PROMPTS,), **engine) -> dict:
        engine = {"kv_cache_memory_bytes": 2**21, "max_num_seqs": 4} | engine
        return {"model": str(folders[name]), "engine": engine, "rounds": list(rounds), "new_tokens": NEW_TOKENS}

    pieces = {"rounds": [[*PROMPTS, LONG], SHARED], "max_num_batched_tokens": 16}
    return {
        **{name: of(name) for name in (*PLAIN, *ROWS, TWO_STEPS, "llama_cascade_rows")},
        **{case: of(name, block_size=size) for case, (name, size) in BLOCKS.items()},
        **{f"{name} in pieces": of(name, **pieces) for name in ("qwen3", "qwen3_rows")},
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    environment("vllm-cpu")
    names = (*PLAIN, *ROWS, TWO_STEPS, "llama_cascade_rows")
    return {name: make(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory) -> dict[str, dict]:
    """Return vLLM's answers to every request, in one process whose kernels are interpreted."""
    return run("vllm-cpu", "run_vllm.py", requests(folders), tmp_path_factory.mktemp("run"), SURGERY_KERNELS="1")


def grids(answer: dict) -> dict[str, set[str]]:
    """Return the grids of every kernel that a model launched."""
    results: dict[str, set[str]] = {}
    for name in answer["watched"]:
        if match := re.fullmatch(r"(\w+_kernel) (\(.*\))", name):
            results.setdefault(match[1], set()).add(match[2])
    return results


@pytest.mark.parametrize("name", [*PLAIN, *ROWS, *BLOCKS])
def test_the_same_tokens_as_transformers(name, answers, folders):
    folder = folders[BLOCKS[name][0] if name in BLOCKS else name]
    assert_as_transformers(answers[name], 0, folder, PROMPTS, NEW_TOKENS)
    assert grids(answers[name]).keys() == KERNELS["rows" in name]


@pytest.mark.parametrize("name", [*PLAIN, *ROWS])
def test_a_cuda_graph_would_find_all_that_changes_where_it_was(name, answers):
    """Steps of three requests whose lengths grow: the same grids, tables and lengths at the same addresses.

    They run under a mode that raises where the host waits for a device (`watched_attention`).
    """
    counts = answers[name]["watched"]
    layers = 1 if name == "qwen3_mla_low_rank" else 2
    of_steps = {kernel: found for kernel, found in grids(answers[name]).items() if kernel != "pack_rows_kernel"}
    assert all(len(found) == 1 for found in of_steps.values())
    (memory,) = (count for key, count in counts.items() if key.startswith("memory"))
    assert memory == (NEW_TOKENS - 1) * layers  # the first token is the prompt's


@pytest.mark.parametrize("name", ["llama", "qwen3_rows", TWO_STEPS])
def test_vllm_would_record_whole_steps_where_kernels_read_all(name, answers):
    has_whole_steps = answers[name]["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert has_whole_steps == (name != TWO_STEPS)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_rows"])
def test_steps_next_to_prompts_in_pieces_and_a_shared_prefix(name, answers, folders):
    """Kernels read the requests that decode, and PyTorch the others of the same batch."""
    answer = answers[f"{name} in pieces"]
    assert_as_transformers(answer, 0, folders[name], [*PROMPTS, LONG], NEW_TOKENS)
    assert answer["rounds"][1]["found"] == [64]
    assert_as_transformers(answer, 1, folders[name], SHARED, NEW_TOKENS)
    assert len(grids(answer)["mla_decode_kernel"]) > 1  # batches of one to four steps


@pytest.mark.parametrize(("name", "kernels"), [(TWO_STEPS, {"pack_rows_kernel"}), ("llama_cascade_rows", set())])
def test_other_rows_are_read_in_pytorch(name, kernels, answers, folders):
    """Rotated pairs with two steps, and low rank in bits."""
    assert_as_transformers(answers[name], 0, folders[name], PROMPTS, NEW_TOKENS)
    assert grids(answers[name]).keys() == kernels


def test_memory_for_unpacked_tokens_is_part_of_the_block(answers):
    """The widest layer's channels in float32, next to the rows of both layers."""
    layers = IN_BITS["llama_rows"][1]
    formats = [[*entry["latent_runs"], *entry["rope_runs"]] for entry in layers]
    row_bytes = sum(count for runs in formats for _, count in runs)
    widest = max(entry["kv_lora_rank"] + 2 * len(entry["rope_inv_freq"]) for entry in layers)
    blocks = 2**21 // (32 * (row_bytes + 4 * widest))
    assert answers["llama_rows"]["blocks"] == pytest.approx(blocks, abs=2)


def test_models_without_rows_hold_as_many_tokens_as_before(answers):
    entries = SOURCES["llama"][1]
    numbers = sum(entry["kv_lora_rank"] + 2 * len(entry["rope_inv_freq"]) for entry in entries)
    assert answers["llama"]["cached_tokens"] == pytest.approx(2**21 / (4 * numbers), rel=0.02)
