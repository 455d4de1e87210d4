"""Trains a model with heads of 128 channels: the demo model with wider heads, taught by the demo model.

    PYTHONPATH=. python tools/heads_128.py work/      # work/heads-128

Rotations of few-bit caches spread a head's values over its channels, so the tables of docs/results.md need a model
with heads as wide as those of large ones. Its KV head of 128 channels starts as the demo model's four of 32. Two such
heads would be half empty: the demo model has no more to put into them. Seeds are fixed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import surgery
from surgery.checkpoint.named_models import demo_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
SETTINGS: dict[str, Any] = {
    "data": [{"source": "builtin", "tokens": 2_000_000}],
    "recall": 0.4,
    "batch_size": 1,
    "gradient_accumulation": 1,
    "dtype": "fp32",
    "held_out": 8,
    "objective": {"kl": 1, "hidden": 10, "cross_entropy": 0.3},
    "betas": [0.9, 0.99],
    "train": "all",
    "learning_rate": 1e-3,
    "max_tokens": 300_000,
    "length": 1024,
}
"""Settings of ``surgery heal``."""


def write_start(folder: Path) -> Path:
    """Write the demo model with heads as `HEADS` has them: its four KV heads in one.

    Pair i of 16 turns as pair 4 i of 64 does, so the first of the four keeps its frequencies. The others take the pairs
    after those, which turn more slowly by up to a third.
    """
    config = AutoConfig.from_pretrained(demo_model(), **HEADS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    model.load_state_dict({name: x for name, x in source.state_dict().items() if "self_attn" not in name}, strict=False)
    for wide, narrow in zip(model.model.layers, source.model.layers, strict=True):
        _widen(wide.self_attn, narrow.self_attn)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(folder)
    return folder


@torch.no_grad()
def _widen(wide: nn.Module, narrow: nn.Module) -> None:
    """Lay 4 KV heads of 32 channels side by side into one of 128; a query head is zero where other heads' keys are."""
    pairs = 4 * torch.arange(16)
    nn.init.zeros_(wide.q_proj.weight)
    nn.init.zeros_(wide.o_proj.weight)
    for head in range(8):
        kv_head = head // 2
        turned, plain = torch.cat([pairs + kv_head, pairs + kv_head + 64]), slice(32 * kv_head, 32 * kv_head + 32)
        query, output = wide.q_proj.weight.view(8, 128, -1)[head], wide.o_proj.weight.view(-1, 8, 128)[:, head]
        query[turned] = 2 * narrow.q_proj.weight.view(8, 32, -1)[head]  # scores are divided by the root of 128
        output[:, plain] = narrow.o_proj.weight.view(-1, 8, 32)[:, head]
        wide.k_proj.weight[turned] = narrow.k_proj.weight.view(4, 32, -1)[kv_head]
        wide.v_proj.weight[plain] = narrow.v_proj.weight.view(4, 32, -1)[kv_head]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of the start and of the result, heads-128")
    work: Path = parser.parse_args().work
    start = write_start(work / "start")
    surgery.heal(start, demo_model(), out=work / "heads-128", measure=False, **SETTINGS)


if __name__ == "__main__":
    main()
