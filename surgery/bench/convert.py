"""``surgery bench convert``: how long a conversion takes and how much memory, on a real model's shape.

The checkpoint is made here: random weights of the named shape, sharded as the original is. Time and peak memory do not
depend on what the weights say. The conversion runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery.bench.shapes import SHAPES, check_shape
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.checkpoint.named_models import asset
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress

DEFAULTS = ("--to", "mla", "--kv-ratio", "0.28125", "--calibration", "none")


@dataclass(frozen=True)
class ConvertBench:
    """Measured seconds and bytes of one conversion."""

    shape: str
    source_bytes: int
    seconds: float
    peak_memory_bytes: int
    report: dict


def measure_conversion(shape: str, folder: Path, arguments: list[str], progress: Progress) -> ConvertBench:
    """Makes a random checkpoint of ``shape`` in ``folder`` if it is not there, and converts it.

    Args:
        arguments: of ``surgery convert``; they win over `DEFAULTS`.

    Raises:
        SurgeryError: an unknown shape, or the conversion failed.
    """
    check_shape(shape)
    source = folder / shape
    if not source.exists():
        make_random_checkpoint(source, SHAPES[shape], progress)
    command = [sys.executable, "-m", "surgery", "convert", str(source), "--out", str(folder / f"{shape}-converted")]
    command += ["--json", *DEFAULTS, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SurgeryError(f"the conversion failed: {' '.join(command)}")
    report = json.loads(done.stdout)
    return ConvertBench(
        shape,
        sum(file.stat().st_size for file in source.glob("*.safetensors")),
        sum(report["seconds"].values()),
        report["peak_memory_bytes"],
        report,
    )


def make_random_checkpoint(out: Path, config: dict, progress: Progress) -> None:
    """Writes a checkpoint of random bf16 weights, tensor by tensor, with the tokenizer of the demo model."""
    plan = {name: TensorSpec(torch.bfloat16, shape) for name, shape in weight_shapes(config)}
    generator = torch.Generator().manual_seed(0)
    with CheckpointWriter(out, plan) as writer:
        with progress.phase("random weights", sum(spec.nbytes for spec in plan.values()), "B") as advance:
            for name, spec in plan.items():
                writer.write(name, random_tensor(name, spec, generator))
                advance(spec.nbytes)
        writer.write_json("config.json", config)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            writer.copy_file(asset("demo-model") / file, file)
        writer.finish()
        writer.commit()


def random_tensor(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """A weight from N(0, 0.02); of a norm, ones."""
    if "norm" in name:
        return torch.ones(spec.shape, dtype=spec.dtype)
    return torch.empty(spec.shape, dtype=spec.dtype).normal_(0, 0.02, generator=generator)


def weight_shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors of a Llama or Mixtral with untied embeddings."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if experts := config.get("num_local_experts"):
            yield prefix + "block_sparse_moe.gate.weight", (experts, hidden)
            parts = {f"block_sparse_moe.experts.{expert}": ("w1", "w3", "w2") for expert in range(experts)}
        else:
            parts = {"mlp": ("gate_proj", "up_proj", "down_proj")}
        for part, (gate, up, down) in parts.items():
            yield f"{prefix}{part}.{gate}.weight", (mlp, hidden)
            yield f"{prefix}{part}.{up}.weight", (mlp, hidden)
            yield f"{prefix}{part}.{down}.weight", (hidden, mlp)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
