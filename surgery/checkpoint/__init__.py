"""Checkpoints on disk: read lazily, written as a stream, verified, then renamed into place.

The room knows folders of safetensors shards, their index and the files beside them; it knows nothing of attention.
A conversion opens a `CheckpointReader`, plans the output's tensors, fills a `CheckpointWriter` tensor by tensor, calls
`finish`, `verify_files` and `commit`. At no time is more than one tensor held in memory.
"""

from surgery.checkpoint.disk import parse_size
from surgery.checkpoint.reader import CheckpointReader
from surgery.checkpoint.staging import check_output
from surgery.checkpoint.tensors import TensorInfo, TensorSpec
from surgery.checkpoint.verify import verify_files
from surgery.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "TensorInfo",
    "TensorSpec",
    "check_output",
    "parse_size",
    "verify_files",
]
