"""What conversions of large models take: `surgery convert --dry-run` on checkpoints of their shapes without weights.

    PYTHONPATH=. python tools/scale.py llama3-8b llama3-70b llama3-405b
    PYTHONPATH=. python tools/scale.py llama3-405b --fit-steps 0

The files have headers and holes: gigabytes that no disk holds. Prints the table of docs/scale.md. The disk may be too
small for the result; the dry run says so, and its numbers all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from surgery.bench.convert import weight_shapes
from surgery.bench.shapes import SHAPES
from surgery.checkpoint.named_models import asset
from surgery.checkpoint.safetensors_format import encode_header
from surgery.checkpoint.tensors import TensorSpec
from surgery.common.human import duration, size

FLOPS = 400e12
"""Of one accelerator in bfloat16: 40% of an H100's 989 TFLOP/s, which NVIDIA states for dense products."""
DISK = 2e9
"""Bytes a second of a disk, for all weights once; a conversion reads them several times."""

SHARED = ("calibrate: forward", "calibrate: backward", "moments", "lag statistics")
"""Phases that ``--processes`` shares; one process does the others."""
PROCESSES = 8

COLUMNS = "weights", "memory", "temporary files", "result", "TFLOP", "at 400 TFLOP/s", "on eight", "weights at 2 GB/s"
HEADER = f"| shape | to | {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * len(COLUMNS)}"


def make_hollow(folder: Path, config: dict) -> None:
    """Writes a checkpoint of zeros, which are holes in its files, with the demo model's tokenizer."""
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
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asset("demo-model") / file, folder / file)


def dry_run(source: Path, target: str, asked: list[str]) -> dict:
    """The plan of a conversion to a quarter of the bytes, with the defaults but for what is asked."""
    command = [sys.executable, "-m", "surgery", "convert", "--to", target, source, "--kv-ratio", "0.25", "--dry-run"]
    command += asked
    command += ["--json", "--out", source.parent / "out"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if not done.stdout:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def line(shape: str, target: str, plan: dict) -> str:
    """A row of the table."""
    weights, disk, flops = plan["source"]["weight_bytes"], plan["disk"], plan["work"]["total_flops"]
    shared = sum(plan["work"]["flops"].get(phase, 0) for phase in SHARED)
    eight = flops - shared * (1 - 1 / PROCESSES)
    cells = [f"`{shape}`", target, size(weights), size(plan["memory"]["host_bytes"]), size(disk["temporary_bytes"])]
    cells += [size(disk["output_bytes"]), f"{flops / 1e12:,.0f}", duration(flops / FLOPS), duration(eight / FLOPS)]
    return "| " + " | ".join([*cells, duration(weights / DISK)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES), metavar="SHAPE")
    parser.add_argument("--targets", nargs="+", default=["mla", "lowrank"])
    said, asked = parser.parse_known_args()  # what else is given is of surgery convert
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for shape in said.shapes:
            make_hollow(Path(folder) / shape, SHAPES[shape])
            for target in said.targets:
                print(line(shape, target, dry_run(Path(folder) / shape, target, asked)), flush=True)
            shutil.rmtree(Path(folder) / shape)


if __name__ == "__main__":
    main()
