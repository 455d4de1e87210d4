"""Checkpoints on disk: read lazily, written as a stream, verified, then renamed into place.

It knows folders of safetensors shards, their index and the files next to them; it knows nothing of attention.
A conversion opens a `CheckpointReader`, plans the output's tensors, fills a `CheckpointWriter` tensor by tensor, calls
`finish`, `verify_files` and `commit`. At no time is more than one tensor held in memory.

Names are imported when they are asked for: `disk`, `hub`, `location` and `staging` know no tensors and need no torch.
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
