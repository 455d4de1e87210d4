"""Decoding in llama.cpp: tokens a second of GGUF files side by side, by context and threads.

python tools/llama_cpp_speed.py source.gguf small.gguf --contexts 512 2048 8000 --threads 1 2

Runs in an environment with xllamacpp (`python tests/engines/environments.py llama.cpp` makes one). Seconds are those
that processors worked, divided by the threads, so that one thread is measured beside other programs too. Files take
turns, and each number is the best of three: the first reads the prompt, and what else a machine does slows it down.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import xllamacpp

NEW_TOKENS, TURNS = 48, 3


def opened(path: str, context: int, threads: int) -> xllamacpp.Server:
    """A server of one row, with llama.cpp's defaults."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = context + 2 * NEW_TOKENS, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def tokens_a_second(server: xllamacpp.Server, prompt: list[int], threads: int) -> float:
    """Of new tokens behind the prompt, which stays in the cache from one call to the next."""
    asked = {"prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True}
    began = time.process_time()
    answer = server.handle_completions(asked)
    if "error" in answer:
        raise SystemExit(f"llama.cpp: {answer['error']['message']}")
    return NEW_TOKENS * threads / (time.process_time() - began)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="GGUF")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 8000])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    asked = parser.parse_args()
    print("| context | threads | " + " | ".join(Path(file).stem for file in asked.files) + " |")
    print("|---:|---:|" + "---:|" * len(asked.files))
    for context in asked.contexts:
        drawn = random.Random(context)
        prompt = [drawn.randrange(100, 4000) for _ in range(context)]
        for threads in asked.threads:
            servers = [opened(path, context, threads) for path in asked.files]
            turns = [[tokens_a_second(server, prompt, threads) for server in servers] for _ in range(TURNS)]
            best = [max(column) for column in zip(*turns, strict=True)]
            print(f"| {context} | {threads} | " + " | ".join(f"{each:.1f}" for each in best) + " |", flush=True)


if __name__ == "__main__":
    main()
