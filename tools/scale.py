"""Forecast or measure the time and memory of conversions of large models, on checkpoints of their shapes.

    PYTHONPATH=. python tools/scale.py llama3-8b llama3-70b llama3-405b
    PYTHONPATH=. python tools/scale.py llama3-8b --weights FOLDER --to mla --kv-ratio 0.28125 --calibration none

The first prints the table of docs/scale.md, from ``surgery convert --dry-run`` on sparse files that consist of headers
and holes. If the disk is too small for the result, the dry run says so and still prints its numbers. The second creates
a checkpoint of random weights, converts it in a separate process and prints its time and peak memory. Other options are
passed to ``surgery convert``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from surgery.bench.shapes import SHAPES
from surgery.checkpoint import CheckpointWriter
from surgery.checkpoint.named_models import asset
from surgery.checkpoint.safetensors_format import encode_header
from surgery.checkpoint.tensors import TensorSpec
from surgery.common.human import duration, size
from surgery.common.progress import Progress

COLUMNS = "weights", "memory", "temporary files", "result"
HEADER = f"| shape | to | {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * len(COLUMNS)}"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def weight_shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of all tensors of a Llama or Mixtral with untied embeddings."""
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


def make_hollow(folder: Path, config: dict) -> None:
    """Write a checkpoint of zeros as sparse files, with the demo model's tokenizer."""
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    parts: dict[str, dict[str, TensorSpec]] = {}
    for name, shape in weight_shapes(config):
        part = name.split(".")[2] if ".layers." in name else "rest"
        parts.setdefault(part, {})[name] = TensorSpec(torch.bfloat16, shape)
    for number, tensors in enumerate(parts.values(), 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        head, _ = encode_header(tensors, {"format": "pt"})
        (folder / file).write_bytes(head)
        os.truncate(folder / file, len(head) + sum(spec.nbytes for spec in tensors.values()))
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER:
        shutil.copy(asset("demo-model") / file, folder / file)


def make_random(folder: Path, config: dict) -> None:
    """Write a checkpoint of random bf16 weights, tensor by tensor, with the demo model's tokenizer."""
    plan = {name: TensorSpec(torch.bfloat16, shape) for name, shape in weight_shapes(config)}
    device = "cuda" if torch.cuda.is_available() else "cpu"  # 52 s for 2.8 GiB on the CPU of a machine with an H100
    generator = torch.Generator(device).manual_seed(0)
    with CheckpointWriter(folder, plan) as writer:
        with Progress().phase("random weights", sum(spec.nbytes for spec in plan.values()), "B") as advance:
            for name, spec in plan.items():
                weight = torch.ones(spec.shape, dtype=spec.dtype, device=device)
                weight = weight if "norm" in name else weight.normal_(0, 0.02, generator=generator)
                writer.write(name, weight.cpu())
                advance(spec.nbytes)
        writer.write_json("config.json", config)
        for file in TOKENIZER:
            writer.copy_file(asset("demo-model") / file, file)
        writer.finish()
        writer.commit()


def convert(source: Path, *arguments: str) -> dict:
    """Run ``surgery convert --json`` and return its output."""
    command = [sys.executable, "-m", "surgery", "convert", str(source), "--out", str(source.parent / "out"), "--json"]
    process = subprocess.run([*command, *arguments], stdout=subprocess.PIPE)
    if not process.stdout:
        sys.exit("the conversion failed")
    return json.loads(process.stdout)


def dry_run(source: Path, target: str, arguments: list[str]) -> dict:
    """Return the dry run of a conversion to a quarter of the KV bytes, with the defaults and further arguments."""
    return convert(source, "--to", target, "--kv-ratio", "0.25", "--dry-run", *arguments)


def line(shape: str, target: str, plan: dict) -> str:
    """Format a row of the table."""
    weights, memory, disk = plan["source"]["weight_bytes"], plan["memory"]["host_bytes"], plan["disk"]
    return (
        f"| `{shape}` | {target} | "
        + " | ".join(map(size, (weights, memory, disk["temporary_bytes"], disk["output_bytes"])))
        + " |"
    )


def measure(shape: str, folder: Path, arguments: list[str]) -> None:
    """Convert a checkpoint of random weights, created if missing, and print time and peak memory."""
    source = folder / shape
    if not source.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_random(source, SHAPES[shape])
    forecast = convert(source, *arguments, "--dry-run")["memory"]["host_bytes"]
    began = time.perf_counter()
    peak = convert(source, *arguments)["peak_memory_bytes"]
    seconds = time.perf_counter() - began
    print(f"{duration(seconds)} by the clock, {size(peak)} of memory; the dry run says {size(forecast)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES), metavar="SHAPE")
    parser.add_argument("--targets", nargs="+", default=["mla", "lowrank"])
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="make random weights there, convert them")
    options, further = parser.parse_known_args()  # other options are those of surgery convert
    if options.weights:
        for shape in options.shapes:
            measure(shape, options.weights, further)
        return
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            make_hollow(Path(folder) / shape, SHAPES[shape])
            for target in options.targets:
                print(line(shape, target, dry_run(Path(folder) / shape, target, further)), flush=True)
            shutil.rmtree(Path(folder) / shape)


if __name__ == "__main__":
    main()
