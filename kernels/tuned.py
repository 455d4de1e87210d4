"""Tuned kernel configurations, one JSON file per GPU; there is no autotuning at run time.

    kernels/tuned/<gpu>.json    {"mla_decode": {"heads=32 rank=512 rope=64 dtype=bfloat16": {"block_tokens": 64, ...}}}

`surgery bench kernels --tune` writes such a file. SURGERY_TUNED names a second folder, whose entries take precedence. A
shape without an entry gets the operation's default.
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
    """Return the key of a shape in the files, such as `heads=32 rank=512 dtype=bfloat16`."""
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in shape.items())


def gpu_name(device: torch.device) -> str | None:
    """Return the name of a GPU as in file names, such as `nvidia-h200`; None for other devices."""
    if device.type != "cuda":
        return None
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


Candidate = dict[str, int | None]
"""Fields of a `Config` and their values."""

trial: Candidate | None = None
"""Configuration that every operation uses within `trying`."""
_keys: dict[str, str] = {}
_chosen: dict[tuple[str, str], Candidate] = {}


@contextmanager
def trying(candidate: Candidate) -> Iterator[dict[str, str]]:
    """Run operators with the candidate's fields over their defaults; yield the shape key by operation."""
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
    """Set the configuration of an operation and shape key for the rest of this process."""
    _chosen[operation, key] = candidate
    forget_plans()


def tuned(operation: str, key: str, device: torch.device, default: Config) -> Config:
    """Return the tuned configuration of an operation for a shape key on a GPU, or the default."""
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
    for path in (Path(base) / f"{gpu}.json" for base in (FOLDER, folder) if base):
        if path.exists():
            for operation, shapes in json.loads(path.read_text(encoding="utf-8")).items():
                for key, values in shapes.items():
                    unknown = set(values) - {field.name for field in fields(Config)}
                    if unknown:
                        raise ValueError(f"{path}: {operation}, {key}: unknown fields {', '.join(sorted(unknown))}")
                    merged.setdefault(operation, {})[key] = values
    return merged
