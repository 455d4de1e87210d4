"""Configurations that were measured to be fast, one JSON file per GPU; nothing is tried out at run time.

    kernels/tuned/<gpu>.json    {"mla_decode": {"heads=32 rank=512 rope=64 dtype=bfloat16": {"block_tokens": 64, ...}}}

`surgery bench kernels --tune` writes such a file. SURGERY_TUNED names another folder that is looked into first. A shape
that is not there gets the operation's default.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import torch

from surgery.kernels.launch import Config
from surgery.kernels.plan import forget_plans

FOLDER = Path(__file__).resolve().parent / "tuned"


def key_of(**shape: int | str | torch.dtype) -> str:
    """A shape as the files name it: `heads=32 rank=512 dtype=bfloat16`."""
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in shape.items())


def gpu_name(device: torch.device) -> str | None:
    """A GPU's name as a file name, `nvidia-h200`; None of anything else."""
    if device.type != "cuda":
        return None
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


Tables = Callable[[str, str | None], dict[str, dict[str, dict[str, int]]]]
"""A GPU's name and a folder of more files → configurations by operation and shape."""


def tables_from(source: Tables) -> Tables:
    """Has `tuned` ask `source` from now on; returns whom it asked before. For who tries configurations out."""
    global _tables
    before, _tables = _tables, source
    forget_plans()
    return before


def tuned(operation: str, key: str, device: torch.device, default: Config) -> Config:
    """The measured configuration of an operation for a shape on a GPU, or the default."""
    name = gpu_name(device)
    found = name and _tables(name, os.environ.get("SURGERY_TUNED")).get(operation, {}).get(key)
    return replace(default, **found) if found else default


@cache
def _read(gpu: str, folder: str | None) -> dict[str, dict[str, dict[str, int]]]:
    merged: dict[str, dict[str, dict[str, int]]] = {}
    for place in [FOLDER, *([Path(folder)] if folder else [])]:
        path = place / f"{gpu}.json"
        if path.exists():
            for operation, shapes in json.loads(path.read_text(encoding="utf-8")).items():
                for key, values in shapes.items():
                    unknown = set(values) - {field.name for field in fields(Config)}
                    if unknown:
                        raise ValueError(f"{path}: {operation}, {key}: unknown {', '.join(sorted(unknown))}")
                    merged.setdefault(operation, {})[key] = values
    return merged


_tables: Tables = _read
