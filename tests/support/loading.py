"""Runs a checkpoint in another process, with nothing but torch and transformers, as a stranger would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

CHILD = """
import json, sys
sys.modules["surgery"] = None  # an editable install is on the path: make importing it an error
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

request = json.load(sys.stdin)
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
inv_freq = model.model.rotary_emb.inv_freq.tolist()
print(json.dumps({"class": type(model).__name__, "cached_numbers": held, "inv_freq": inv_freq}))
"""


def run_elsewhere(
    path: Path, tokens: Tensor, folder: Path, *, dtype: str = "float32", trust: bool = False
) -> tuple[Tensor, Tensor, dict]:
    """Logits of one forward pass, logits decoded through a cache, and facts on the model."""
    tokens_file, out_file = folder / "tokens.safetensors", folder / "logits.safetensors"
    save_file({"tokens": tokens}, tokens_file)
    request = {"path": str(path), "tokens": str(tokens_file), "out": str(out_file), "dtype": dtype, "trust": trust}
    done = subprocess.run(
        [sys.executable, "-I", "-c", CHILD], input=json.dumps(request), capture_output=True, text=True, cwd=folder
    )
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    result = load_file(out_file)
    return result["logits"], result["cached"], json.loads(done.stdout.splitlines()[-1])
