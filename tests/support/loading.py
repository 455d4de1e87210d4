"""Runs checkpoints in another process, with nothing but torch and transformers, as a stranger would."""

import json
from pathlib import Path

from processes import Fork
from safetensors.torch import load_file, save_file
from torch import Tensor

CHILD = """
import json, sys
sys.modules["surgery"] = None  # an editable install is on the path: make importing it an error
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

path, folder, dtype, trust = sys.argv[1:]
tokens = load_file(folder + "/tokens.safetensors")["tokens"]
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), trust_remote_code=bool(trust)).eval()
with torch.no_grad():
    logits = model(tokens).logits
    cache = DynamicCache(config=model.config)
    steps = [model(tokens[:, :-4], past_key_values=cache).logits]
    steps += [model(t, past_key_values=cache).logits for t in tokens[:, -4:].split(1, dim=1)]
held = sum(t.numel() for layer in cache.layers for t in map(vars(layer).get, ("keys", "values")) if t is not None)
save_file({"logits": logits, "cached": torch.cat(steps, dim=1)}, folder + "/logits.safetensors")
rotary = model.model.rotary_emb
inv_freq = rotary.inv_freq.tolist() if hasattr(rotary, "inv_freq") else None
print(json.dumps({"class": type(model).__name__, "cached_numbers": held, "inv_freq": inv_freq}))
"""


def run_elsewhere(
    path: Path, tokens: Tensor, folder: Path, *, dtype: str = "float32", trust: bool = False
) -> tuple[Tensor, Tensor, dict]:
    """Logits of one forward pass, logits decoded through a cache, and facts on the model."""
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    stranger = Fork(path, folder, dtype, "trust" if trust else "", code=CHILD, path=(), cwd=folder)
    assert stranger.wait() == 0, stranger.stderr[-2000:]
    result = load_file(folder / "logits.safetensors")
    return result["logits"], result["cached"], json.loads(stranger.stdout.splitlines()[-1])
