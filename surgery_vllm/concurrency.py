"""Benchmark of concurrent requests in vLLM under a fixed KV cache budget, for several models on the same load.

    python -m surgery_vllm.concurrency SOURCE CONVERTED --kv-bytes 8388608

Requires vLLM. The load is random tokens, the same for every model: prompts of various lengths that arrive at once, and
answers of one length. Prints for each model the tokens that its cache holds, the number of preemptions (the cache of a
request is dropped and recomputed later), the seconds until the last answer, and the CPU seconds, which are more
reliable if other programs run at the same time.
"""

import argparse
import json
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context


@dataclass(frozen=True)
class Load:
    """Load that every model serves.

    Attributes:
        kv_bytes: bytes of the KV cache.
        requests: number of requests, which arrive at once.
        prompt: least and most tokens of a prompt.
        new_tokens: tokens of every answer.
        batched_tokens: most tokens of all requests in one pass, vLLM's default if None; streaming heads hold them all.
    """

    kv_bytes: int = 8 << 20
    requests: int = 64
    prompt: tuple[int, int] = (256, 768)
    new_tokens: int = 128
    batched_tokens: int | None = None
    seed: int = 0

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Draw random prompts of token ids, without the first 16 of the vocabulary, which are often special tokens."""
        draw = random.Random(self.seed)
        lengths = [draw.randint(*self.prompt) for _ in range(self.requests)]
        return [[draw.randrange(16, vocabulary) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Served:
    """Measurement of one model under a load."""

    model: str
    tokens_held: int
    preemptions: int
    seconds: float
    cpu_seconds: float


def serve(model: str, load: Load, dtype: str) -> Served:
    """Run a load on one model in this process, which must not have run a model before."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_memory_bytes=load.kv_bytes,
        max_model_len=load.prompt[1] + load.new_tokens,
        max_num_seqs=load.requests,
        max_num_batched_tokens=load.batched_tokens,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
    )
    config = llm.llm_engine.vllm_config
    sampling = SamplingParams(temperature=0.0, max_tokens=load.new_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in load.prompts(config.model_config.get_vocab_size())]
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # warm-up: compilation
    began, began_cpu = time.perf_counter(), time.process_time()
    llm.generate(prompts, sampling, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    cache = config.cache_config
    return Served(
        model,
        tokens_held=cache.kv_cache_size_tokens,  # in requests of `max_model_len`, over all KV cache groups
        preemptions=sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"),
        seconds=round(seconds, 1),
        cpu_seconds=round(cpu_seconds, 1),
    )


HEADER = "| model | tokens held | preemptions | seconds | CPU seconds |\n|---|---:|---:|---:|---:|"


def line(row: Served) -> str:
    """Format a measurement as a row of a Markdown table."""
    name = os.path.basename(os.path.normpath(row.model))
    return f"| `{name}` | {row.tokens_held:,} | {row.preemptions} | {row.seconds:.1f} | {row.cpu_seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="CKPT")
    parser.add_argument("--kv-bytes", type=int, default=Load.kv_bytes, help="bytes of the KV cache [%(default)s]")
    parser.add_argument("--requests", type=int, default=Load.requests, help="concurrent requests [%(default)s]")
    parser.add_argument("--prompt", type=int, nargs=2, default=Load.prompt, metavar=("FEWEST", "MOST"))
    parser.add_argument("--new-tokens", type=int, default=Load.new_tokens, help="new tokens per request [%(default)s]")
    parser.add_argument("--batched-tokens", type=int, help="most tokens of all requests in one pass [vLLM's default]")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and cache [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON row per line instead of a table")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # the table is all of standard output
    load = Load(args.kv_bytes, args.requests, tuple(args.prompt), args.new_tokens, args.batched_tokens)
    if not args.json:
        print(HEADER)
    for model in args.models:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            row = process.submit(serve, model, load, args.dtype).result()
        print(json.dumps(asdict(row)) if args.json else line(row), flush=True)


if __name__ == "__main__":
    main()
