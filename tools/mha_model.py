"""Makes a small model with as many KV heads as query heads: `python tools/mha_model.py OUT`.

The demo model's KV heads are given to every query head of their groups, pushed apart by noise of their own size and
trained with all else on the standard library's code, so that heads differ: about six minutes of one core.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.checkpoint.named_models import model_named
from surgery.common.progress import Progress
from surgery.training.heal import heal
from surgery.training.settings import HealSettings

SEED, NOISE = 0, 1.0
TOKENS, RATE = 240_000, 1e-3


def with_own_heads(path: Path) -> None:
    """Writes the demo model with a KV head for every query head, untrained."""
    source = AutoModelForCausalLM.from_pretrained(model_named("builtin"), dtype=torch.float32)
    config, generator = source.config, torch.Generator().manual_seed(SEED)
    heads, group = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    state = source.state_dict()
    for name, weight in state.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            own = weight.unflatten(0, (-1, config.head_dim)).repeat_interleave(group, 0).flatten(0, 1)
            noise = torch.randn(own.shape, generator=generator) * own.square().mean().sqrt()
            state[name] = own + NOISE * noise
    config.num_key_value_heads = heads
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_named("builtin")).save_pretrained(path)


def main() -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as folder:
        with_own_heads(Path(folder, "untrained"))
        settings = HealSettings(
            student=str(Path(folder, "untrained")),
            out=sys.argv[1],
            objective={"cross_entropy": 1.0},
            train="all",
            learning_rate=RATE,
            gradient_accumulation=1,
            max_tokens=TOKENS,
            seed=SEED,
        )
        report = heal(settings, Progress())
    print(report["held_out"] if "held_out" in report else report.keys())


if __name__ == "__main__":
    main()
