"""Machine facts for bug reports: versions, cores, memory; no paths or names."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "triton",
    "accelerate",
    "peft",
    "datasets",
    "wandb",
    "gguf",
    "lm_eval",
    "vllm",
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES")


def seconds_since_start() -> float:
    """Return the seconds since this process started, imports included."""
    return time.time() - psutil.Process().create_time()


def machine_facts(*, gpu: bool) -> dict[str, Any]:
    """Collect machine facts as plain values; with ``gpu`` also accelerators, which imports torch."""
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "environment": {name: os.environ[name] for name in THREADS if name in os.environ},
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }
    return {**facts, "accelerators": _accelerators()} if gpu else facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerators() -> list[dict[str, Any]]:
    import torch

    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
            }
        )
    return names
