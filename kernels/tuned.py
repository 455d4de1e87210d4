"""Configurations that were measured to be fast, one JSON file per GPU; nothing is tried out at run time.

    kernels/tuned/<gpu>.json    {"mla_decode": {"heads=32 rank=512 rope=64 dtype=bfloat16": {"block_tokens": 64, ...}}}

`surgery bench kernels --tune` writes such a file. SURGERY_TUNED names another folder that is looked into first. A shape
that is not there gets the operation's default.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
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


Candidate = dict[str, int | None]
"""Fields of a `Config` and their values."""

trial: Candidate | None = None
"""Configuration that `trying` has every operation run with."""
_keys: dict[str, str] = {}
_chosen: dict[tuple[str, str], Candidate] = {}


@contextmanager
def trying(candidate: Candidate) -> Iterator[dict[str, str]]:
    """Run operators with a candidate, the defaults where it is empty; yield the shape's key by operation."""
    global trial
    trial = candidate
    _keys.clear()
    forget_plans()
    try:
        yield _keys
    finally:
        trial = None
        forget_plans()


def use(operation: str, key: str, candidate: Candidate) -> None:
    """Let operators of this process run with a configuration from now on."""
    _chosen[operation, key] = candidate
    forget_plans()


def tuned(operation: str, key: str, device: torch.device, default: Config) -> Config:
    """The measured configuration of an operation for a shape on a GPU, or the default."""
    if trial is not None:
        _keys[operation] = key
        return replace(default, **trial)
    values = _chosen.get((operation, key))
    if values is None and (name := gpu_name(device)):
        values = _read(name, os.environ.get("SURGERY_TUNED")).get(operation, {}).get(key)
    return replace(default, **values) if values else default


@cache
def _read(gpu: str, folder: str | None) -> dict[str, dict[str, Candidate]]:
    merged: dict[str, dict[str, Candidate]] = {}
    for path in (Path(place) / f"{gpu}.json" for place in (FOLDER, folder) if place):
        if path.exists():
            for operation, shapes in json.loads(path.read_text(encoding="utf-8")).items():
                for key, values in shapes.items():
                    unknown = set(values) - {field.name for field in fields(Config)}
                    if unknown:
                        raise ValueError(f"{path}: {operation}, {key}: unknown {', '.join(sorted(unknown))}")
                    merged.setdefault(operation, {})[key] = values
    return merged
