"""Trains a model with heads of 128 channels: the demo model with other attention, taught by the demo model.

    PYTHONPATH=. python tools/heads_128.py work/      # work/heads-128

Rotations of few-bit caches spread a head's values over its channels, so the tables of docs/results.md need a model
with heads as wide as those of large ones. Embeddings, MLPs and norms are the demo model's. Its 8 query and 4 KV heads
of 32 channels make room for 8 and 2 of 128, drawn at random, which learn first each layer's attention output, then the
predictions of the whole model. Seeds are fixed.
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

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
COMMON: dict[str, Any] = {
    "data": [{"source": "builtin", "tokens": 2_000_000}],
    "recall": 0.4,
    "batch_size": 1,
    "gradient_accumulation": 1,
    "dtype": "fp32",
    "held_out": 8,
}
STAGES: dict[str, dict[str, Any]] = {
    "layers": {
        "objective": {"layerwise": 1},
        "train": "attention",
        "learning_rate": 2e-3,
        "max_tokens": 120_000,
        "length": 512,
    },
    "heads-128": {
        "objective": {"kl": 1, "hidden": 10, "cross_entropy": 0.3},
        "betas": [0.9, 0.99],
        "train": "all",
        "learning_rate": 1e-3,
        "max_tokens": 300_000,
        "length": 1024,
    },
}
"""Settings of ``surgery heal`` by the name of the result."""


def write_start(folder: Path) -> Path:
    """Write the demo model with attention of `HEADS` drawn at random."""
    config = AutoConfig.from_pretrained(demo_model(), **HEADS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).state_dict()
    model.load_state_dict({name: tensor for name, tensor in source.items() if "self_attn" not in name}, strict=False)
    for name, weight in model.named_parameters():
        if "self_attn" in name:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(folder)
    return folder


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of the stages; a stage that is there is left out")
    work: Path = parser.parse_args().work
    student = write_start(work / "start")
    for name, settings in STAGES.items():
        if not (work / name).exists():
            surgery.heal(student, demo_model(), out=work / name, measure=False, **COMMON, **settings)
        student = work / name


if __name__ == "__main__":
    main()
