"""What a result may depend on besides its inputs: versions and the machine. Nothing of who uses it, and no paths."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from surgery.common.threads import OURS
from surgery.version import __version__

NEEDED = ("torch", "transformers", "safetensors", "numpy", "tokenizers", "huggingface_hub")
OPTIONAL = ("triton", "accelerate", "peft", "datasets", "wandb", "gguf", "vllm")
THREADS = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")
_CGROUP = Path("/sys/fs/cgroup")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of installed packages, by their names; none is imported."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def machine() -> dict[str, Any]:
    """Versions, system, processor, memory in bytes, settings of threads; None for what this system does not tell."""
    return {
        "surgery": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": versions((*NEEDED, *OPTIONAL)),
        "platform": platform.platform(),
        "cpu": {"name": _processor(), "cores": os.cpu_count(), "usable_cores": _usable_cores()},
        "memory": {"total_bytes": _total_memory(), "limit_bytes": _memory_limit()},
        "threads": {
            name: {"value": os.environ[name], "by_surgery": name in OURS} for name in THREADS if name in os.environ
        },
    }


def gpus() -> dict[str, Any]:
    """What torch says of accelerators; the one thing here that imports it."""
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = [torch.cuda.get_device_properties(index) for index in range(count)]
    except Exception as error:  # a broken installation or driver raises anything, which is what is asked for
        return {"error": " ".join(str(error).split())[:200].replace(str(Path.home()), "~")}
    return {
        "cuda": torch.version.cuda,
        "devices": [
            {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
            for each in found
        ],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _memory_limit() -> int | None:
    """Of the control group that this process runs in, such as a container's."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            said = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        # Version 1 says that there is none by a number larger than any memory.
        return int(said) if said.isdigit() and int(said) < 2**60 else None
    return None
