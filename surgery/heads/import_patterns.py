"""Import of patterns in the formats of DuoAttention and PruLong.

DuoAttention (github.com/mit-han-lab/duo-attention) writes ``full_attention_heads.tsv`` with a line per layer and a gate
per KV head, and ``sink_size`` and ``recent_size`` in ``config.json`` next to it. PruLong
(github.com/princeton-pli/PruLong) writes ``masks.tsv`` or ``masks_sp<sparsity>.tsv`` in the same layout to a checkpoint
folder: 1 for a full head, 0 for a streaming one; its config.json has ``sink_size`` and ``local_window_size``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from surgery.checkpoint.disk import disk_errors, read_json_or_empty
from surgery.common.errors import SurgeryError
from surgery.heads.pattern import HeadPattern

DUO_FILE, PRULONG_FILE = "full_attention_heads.tsv", "masks.tsv"


def read_pattern(path: str | Path) -> HeadPattern:
    """Read a pattern file of this package, a table of DuoAttention or PruLong, or a folder with one.

    A table of zeros and ones is read as PruLong's masks, any other as DuoAttention's gates, which are not clipped: that
    would only add ties. Sinks and recent tokens are None if no config.json has them. Raises SurgeryError: the file is
    missing, or not a table of numbers with a line per layer.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = [path / name for name in (DUO_FILE, PRULONG_FILE) if (path / name).is_file()]
        if not files:
            raise SurgeryError.at(path, f"contains neither {DUO_FILE} nor {PRULONG_FILE}; pass the pattern file")
        path = files[0]
    return _read_table(path) if path.suffix == ".tsv" else HeadPattern.load(path)


def _read_table(path: Path) -> HeadPattern:
    with disk_errors(path):
        content = path.read_bytes()
    try:
        lines = content.decode("utf-8").splitlines()
        rows = [[float(value) for value in line.split("\t")] for line in lines if line.strip()]
        scores = torch.tensor(rows, dtype=torch.float32)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError.at(
            path, f"must be a table with a row per layer and a column per KV head ({reason})"
        ) from None
    masks = bool(((scores == 0) | (scores == 1)).all())
    config = path.with_name("config.json")
    settings = read_json_or_empty(config)
    sinks = settings.get("sink_size")
    recent = settings.get("local_window_size" if masks and "local_window_size" in settings else "recent_size")
    try:
        return HeadPattern(
            scores,
            "prulong" if masks else "duo",
            sinks,
            recent,
            facts={"imported": "masks of PruLong" if masks else "gates of DuoAttention", "file": path.name},
            model={"name": name} if isinstance(name := settings.get("model_name"), str) else {},
        )
    except SurgeryError as error:
        raise SurgeryError.at(path, f"{error}") from None
