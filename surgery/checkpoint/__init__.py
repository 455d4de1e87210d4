"""Checkpoints on disk: read lazily, streamed to a staging folder, verified, then renamed into place.

This package handles folders of safetensors shards with their index and sidecar files, and nothing about attention.
A conversion opens a `CheckpointReader`, plans the output's tensors, writes each to a `CheckpointWriter`, then calls
`finish`, `verify_files` and `commit`. At most one tensor is in memory at a time.

Names are imported on first use: `disk`, `hub`, `location` and `staging` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surgery.checkpoint.disk import parse_size
    from surgery.checkpoint.reader import CheckpointReader
    from surgery.checkpoint.staging import check_output
    from surgery.checkpoint.tensors import TensorInfo, TensorSpec
    from surgery.checkpoint.verify import verify_files
    from surgery.checkpoint.writer import CheckpointWriter

_HOMES = {
    "CheckpointReader": "reader",
    "CheckpointWriter": "writer",
    "TensorInfo": "tensors",
    "TensorSpec": "tensors",
    "check_output": "staging",
    "parse_size": "disk",
    "verify_files": "verify",
}

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "TensorInfo",
    "TensorSpec",
    "check_output",
    "parse_size",
    "verify_files",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
