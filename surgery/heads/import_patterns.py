"""Patterns that other projects published, read as ours.

DuoAttention (github.com/mit-han-lab/duo-attention) writes ``full_attention_heads.tsv``, a line a layer and a gate a KV
head as `numpy.savetxt` writes them, and its settings in ``config.json`` next to it, ``sink_size`` and ``recent_size``
among them. PruLong (github.com/princeton-pli/PruLong, save_prulong_masks.py) writes ``masks.tsv`` or
``masks_sp<sparsity>.tsv`` into a checkpoint's folder: 1 for a full head and 0 for a streaming one in the same layout,
and the checkpoint's config.json has ``sink_size`` and ``local_window_size``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from surgery.checkpoint.disk import disk_errors, read_json
from surgery.common.errors import SurgeryError
from surgery.heads.pattern import HeadPattern

DUO_FILE, PRULONG_FILE = "full_attention_heads.tsv", "masks.tsv"


def read_pattern(path: str | Path) -> HeadPattern:
    """Reads a pattern of ours, of DuoAttention or of PruLong.

    A table counts as PruLong's masks if it holds nothing but 0 and 1, and as DuoAttention's gates otherwise. Gates are
    left unchanged: DuoAttention's clipping to [0, 1] would only add ties. Sinks and recent tokens are None where the
    config.json next to a table does not tell them.

    Args:
        path: a pattern file, a table, or a folder that holds one by its published name.

    Raises:
        SurgeryError: there is nothing such, or it is no table of numbers with a line a layer.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = [path / name for name in (DUO_FILE, PRULONG_FILE) if (path / name).is_file()]
        if not files:
            raise SurgeryError.at(path, f"holds neither {DUO_FILE} nor {PRULONG_FILE}; name the pattern's file")
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
        raise SurgeryError.at(path, f"not a table of a layer a line and a KV head a column ({reason})") from None
    masks = bool(((scores == 0) | (scores == 1)).all())
    config = path.with_name("config.json")
    settings = read_json(config) if config.is_file() else {}
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
