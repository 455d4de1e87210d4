"""Runs checkpoints in another process, with nothing but torch and transformers, as a stranger would."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

from safetensors.torch import load_file, save_file
from torch import Tensor

CHILD = """
import json, sys, traceback
sys.modules["surgery"] = None  # an editable install is on the path: make importing it an error
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

def answer(request):
    tokens = load_file(request["tokens"])["tokens"]
    model = AutoModelForCausalLM.from_pretrained(
        request["path"], dtype=getattr(torch, request["dtype"]), trust_remote_code=request["trust"]
    ).eval()
    with torch.no_grad():
        logits = model(tokens).logits
        cache = DynamicCache(config=model.config)
        steps = [model(tokens[:, :-4], past_key_values=cache).logits]
        steps += [model(t, past_key_values=cache).logits for t in tokens[:, -4:].split(1, dim=1)]
    held = sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values) if t is not None)
    save_file({"logits": logits, "cached": torch.cat(steps, dim=1)}, request["out"])
    rotary = model.model.rotary_emb
    inv_freq = rotary.inv_freq.tolist() if hasattr(rotary, "inv_freq") else None
    return {"class": type(model).__name__, "cached_numbers": held, "inv_freq": inv_freq}

for line in sys.stdin:
    try:
        facts = answer(json.loads(line))
    except Exception:
        facts = {"error": traceback.format_exc()}
    print("facts: " + json.dumps(facts), flush=True)
"""


def run_elsewhere(
    path: Path, tokens: Tensor, folder: Path, *, dtype: str = "float32", trust: bool = False
) -> tuple[Tensor, Tensor, dict]:
    """Logits of one forward pass, logits decoded through a cache, and facts on the model."""
    tokens_file, out_file = folder / "tokens.safetensors", folder / "logits.safetensors"
    save_file({"tokens": tokens}, tokens_file)
    request = {"path": str(path), "tokens": str(tokens_file), "out": str(out_file), "dtype": dtype, "trust": trust}
    process, errors = _stranger()
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    facts = next((line for line in process.stdout if line.startswith("facts: ")), None)
    if facts is None:
        errors.seek(0)
        raise AssertionError(f"the process ended: {errors.read()[-2000:]}")
    facts = json.loads(facts.removeprefix("facts: "))
    if "error" in facts:
        raise AssertionError(facts["error"][-2000:])
    result = load_file(out_file)
    return result["logits"], result["cached"], facts


@cache
def _stranger() -> tuple[subprocess.Popen, IO[str]]:
    """One process for all checkpoints, since importing transformers takes longer than running one; and its errors."""
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process, which ends with this one
    command = [sys.executable, "-I", "-c", CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    return subprocess.Popen(command, text=True, cwd=tempfile.gettempdir(), **pipes), errors
