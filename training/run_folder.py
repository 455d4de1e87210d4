"""Names of the files that a training owns in ``<out>.run``; other files there are foreign. Imports no torch."""

from __future__ import annotations

from surgery.checkpoint.output_path import LOCK
from surgery.checkpoint.work_folder import MARKER

LOG = "heal.jsonl"
STATE_FILES = ("*.json", "*.bin", "*.pkl", "*.pt", "*.safetensors")
STATE_FILES += ("pytorch_model*/*", "pytorch_model*/.metadata", "optimizer*/*", "optimizer*/.metadata")
"""Files of a training checkpoint: the loop's, accelerate's, and the shards of FSDP."""

TOKEN_FILES = ("about.json", "tokens.i4", "labeled.u1", "lengths.i8")
"""Files of a tokenized source."""

CHECKPOINT_FILES = tuple(f"{name}/{file}" for name in ("step-*", "best", "best.partial") for file in STATE_FILES)
RUN_FILES = (
    *(LOG, f".{LOG}.*.partial", MARKER, f".{MARKER}.*.partial", LOCK),
    *(f"checkpoints/{file}" for file in CHECKPOINT_FILES),
    *(f"data/tokens-*/{file}" for file in TOKEN_FILES),
)
