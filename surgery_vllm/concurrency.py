"""Concurrency: the requests that a fixed KV budget serves, with models side by side in vLLM on the same load.

    python -m surgery_vllm.concurrency SOURCE CONVERTED --kv-bytes 8388608

Runs where vLLM is installed. The load is random tokens, the same for every model: prompts of many lengths that arrive
at once, answers of one length. Prints for each model the tokens that its pages have room for, how often a request was
preempted (its cache dropped and computed again later), the seconds until the last answer, and those that processors
worked for it, which say more where other programs run beside.
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
    """Load of every model.

    Attributes:
        kv_bytes: budget of the cache.
        requests: how many arrive at once.
        prompt: fewest and most tokens of a prompt.
        new_tokens: of every answer.
        batched_tokens: of all requests in one pass at most, vLLM's own choice if None; streaming heads hold them all.
    """

    kv_bytes: int = 8 << 20
    requests: int = 64
    prompt: tuple[int, int] = (256, 768)
    new_tokens: int = 128
    batched_tokens: int | None = None
    seed: int = 0

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Token ids; the first of a vocabulary, which are often special, are left out."""
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
    """Runs a load on one model in this process, which must not have run one before."""
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
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # what is compiled at the first call
    began, began_cpu = time.perf_counter(), time.process_time()
    llm.generate(prompts, sampling, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    cache = config.cache_config
    return Served(
        model,
        tokens_held=cache.kv_cache_size_tokens,  # in requests of `max_model_len`, by all groups of the cache
        preemptions=sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"),
        seconds=round(seconds, 1),
        cpu_seconds=round(cpu_seconds, 1),
    )


HEADER = "| model | tokens held | preemptions | seconds | CPU seconds |\n|---|---:|---:|---:|---:|"


def line(row: Served) -> str:
    """A row of a Markdown table."""
    name = os.path.basename(os.path.normpath(row.model))
    return f"| `{name}` | {row.tokens_held:,} | {row.preemptions} | {row.seconds:.1f} | {row.cpu_seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="CKPT")
    parser.add_argument("--kv-bytes", type=int, default=Load.kv_bytes, help="of the KV cache [%(default)s]")
    parser.add_argument("--requests", type=int, default=Load.requests, help="that arrive at once [%(default)s]")
    parser.add_argument("--prompt", type=int, nargs=2, default=Load.prompt, metavar=("FEWEST", "MOST"))
    parser.add_argument("--new-tokens", type=int, default=Load.new_tokens, help="of every answer [%(default)s]")
    parser.add_argument("--batched-tokens", type=int, help="of all requests in one pass at most [vLLM's choice]")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache [%(default)s]")
    parser.add_argument("--json", action="store_true", help="a row a line in JSON instead of a table")
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
