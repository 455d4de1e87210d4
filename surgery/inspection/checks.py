"""``surgery verify``: the checks of a conversion, repeated on a checkpoint at any time and on any machine.

- files: they have the hashes in the report.
- numbers: all weights are finite.
- caches: every layer loads, and decoding through its cache equals one forward pass.
- KV bytes: the caches hold the bytes that the report states.
- logits: a few logits equal those in the report.
- whole model, if it fits in memory: logits do not depend on how a prompt is split or padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache

from surgery.architectures.custom_class import layer_entries
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.file_kinds import as_text, summary
from surgery.checkpoint.model_folder import model_folder
from surgery.checkpoint.tensors import all_finite
from surgery.common.errors import SurgeryError
from surgery.common.human import size
from surgery.common.progress import Progress
from surgery.model.cache_argument import CACHE
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.models import whole_model
from surgery.running.source import OwnSource, Source
from surgery.running.unfused import open_model
from surgery.verification.again import open_written, run_layers, verify_again
from surgery.verification.probe import compute_probe, probe_difference
from surgery.verification.record import FileComparison, Recorded, compare_files
from surgery.verification.written import CACHE_TOLERANCE, QUANTIZED_TOLERANCE, TOLERANCE

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
SHOWN = 5
"""Number of files that a failed check names."""
_SOURCE_FILES = {
    "templates": "templates of the source",
    "code": "code of the source",
    "left_out": "left out of the source",
}


@dataclass(frozen=True)
class Check:
    """Result of one check: its name, outcome and details."""

    name: str
    outcome: str
    message: str


@dataclass(frozen=True)
class Checked:
    """Results of all checks of a checkpoint, kinds of unlisted files, and of the source's files."""

    path: str
    checks: list[Check]
    unlisted: dict[str, str] = field(default_factory=dict)
    source_files: dict[str, list[str]] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        """Checks that did not pass."""
        return [check for check in self.checks if check.outcome == FAILED]


class _NotChecked(Exception):
    """Reason why a check could not run."""


def verify_checkpoint(
    source: str | Path, *, device: str = "auto", seed: int = 0, progress: Progress | None = None
) -> Checked:
    """Run all checks on a checkpoint; failures are reported, not raised.

    Args:
        source: folder or hub id of a checkpoint, converted or not.
        device: device on which layers run.
        seed: seed of the random tokens.

    Raises:
        SurgeryError: there is no checkpoint, or its files are inconsistent.
    """
    progress = progress or Progress(silent=True)
    reader = open_model(source)
    checks, report = [], Recorded()
    try:
        report = Recorded.in_folder(reader.path)
    except SurgeryError as error:
        checks.append(Check("report", FAILED, str(error)))
    folder = reader.source if reader.source.is_dir() else reader.path
    compared = FileComparison((), (), {})
    if report.files:
        compared = compare_files(folder, report.files, progress)
    others = {as_text(name): kind.value for name, kind in compared.unlisted.items()}, report.source_files or {}
    checks.append(_check("files", lambda: _files(report, compared)))
    checks.append(_check("numbers", lambda: _numbers(reader, progress)))
    running: dict[str, Any] = {}

    def opened():
        if "opened" not in running:
            running["opened"] = open_written(reader, device)
        return running["opened"]

    checks.append(_check("caches", lambda: _caches(reader, opened(), seed, progress)))
    checks.append(_check("KV bytes", lambda: _kv_bytes(reader, opened(), report)))
    checks.append(_check("logits", lambda: _logits(reader, opened(), report)))
    checks.append(_check("whole model", lambda: _whole(reader, opened(), seed)))
    reader.check_untouched()
    return Checked(str(source), checks, *others)


def _check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, PASSED, look())
    except _NotChecked as reason:
        return Check(name, NOT_CHECKED, str(reason))
    except SurgeryError as error:
        return Check(name, FAILED, str(error))


def _files(report: Recorded, compared: FileComparison) -> str:
    if not report.files:
        whose = "the report is of an earlier version" if report.there else "the report is missing"
        raise _NotChecked(f"{whose}, so there are no hashes to compare with")
    if compared.missing:
        raise SurgeryError(f"{compared.missing[0]} is missing; download it again")
    if compared.changed:
        raise SurgeryError(f"{compared.changed[0]} was changed after it was written; download it again")
    if compared.refused:
        names = [f"{as_text(name)} ({kind.value})" for name, kind in compared.refused.items()]
        names = [*names[:SHOWN], *([f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else [])]
        others = summary(compared.unlisted.keys() - compared.refused.keys())
        also = f" (other files: {', '.join(others)})" if others else ""
        raise SurgeryError(
            f"not written by the conversion: {', '.join(names)}; remove what you did not put there{also}"
        )
    text = f"{len(report.files)} files, unchanged since they were written"
    if compared.unlisted:
        text += f"; other files: {', '.join(summary(compared.unlisted))}"
    for kind, names in (report.source_files or {}).items():
        if names:
            text += f"; {_SOURCE_FILES.get(kind, kind)}: {', '.join(summary(names))}"
    return text


def _numbers(reader: CheckpointReader, progress: Progress) -> str:
    names = reader.names()
    with progress.phase("read the weights", sum(reader.info(name).nbytes for name in names), "B") as advance:
        for name in names:
            if not all(map(all_finite, reader.chunks(name))):
                raise SurgeryError(f"{name} holds NaN or infinity")
            advance(reader.info(name).nbytes)
    return f"{len(names)} tensors, all finite"


def _caches(reader: CheckpointReader, opened, seed: int, progress: Progress) -> str:
    result = verify_again(reader, opened, seed, progress)
    if result.cache_difference is None:
        return f"every layer loads and decodes; {result.kv_tokens} tokens"
    return f"every layer loads; decoding differs from one pass by {result.cache_difference:.0e} of its output"


def _kv_bytes(reader: CheckpointReader, opened, report: Recorded) -> str:
    if report.kv is None:
        raise _NotChecked("the report does not state them")
    tokens, stated = report.kv
    predicted = kv_bytes_of(reader.config, opened.weight_dtype)(tokens) / tokens
    if not abs(predicted - stated) <= 1e-6 * predicted:
        raise SurgeryError(f"{predicted:,.1f} per token, but {stated:,.1f} in the report")
    return f"{predicted:,.0f} per token at {tokens:,} tokens, as in the report"


def _logits(reader: CheckpointReader, opened, report: Recorded) -> str:
    record = report.probe
    if record is None:
        raise _NotChecked("the report has no logits to compare with")
    tokens = torch.tensor(record["tokens"])
    hidden = run_layers(opened.stream, tokens[None], record["piece"])
    difference = probe_difference(record, compute_probe(opened.stream, tokens, hidden[0], record["piece"]))
    exact = CACHE_TOLERANCE[getattr(torch, record["dtype"])] + TOLERANCE[torch.float32]
    rounds = record["piece"] or any(entry.quantizes for entry in layer_entries(reader.config))
    allowed = QUANTIZED_TOLERANCE if rounds else exact
    if not difference <= allowed:
        raise SurgeryError(f"they differ from the report's by {difference:.1e} of their standard deviation")
    return f"as in the report, within {difference:.0e} of their standard deviation"


def _whole(reader: CheckpointReader, opened, seed: int) -> str:
    weights = sum(reader.info(name).nbytes for name in reader.names())
    needed = weights * 4 // opened.weight_dtype.itemsize  # it runs in float32
    if needed > psutil.virtual_memory().available // 2:
        raise _NotChecked(f"needs {size(needed)} of memory")
    return check_whole_model(reader, opened, seed)


LENGTH, PIECES, PADDING = 48, (20, 20, 8), 5
WHOLE_TOLERANCE = 1e-3
"""Tolerance of logits in float32, relative to their standard deviation."""


@torch.no_grad()
def check_whole_model(reader: CheckpointReader, opened: Source | OwnSource, seed: int) -> str:
    """Check that logits do not depend on how a prompt is split, or on other rows; return a summary of the comparisons.

    Caches with scales of token groups are not left-padded, which would shift the groups. Caches that quantize
    groups of tokens are not read in pieces either: the pass that completes a group computes another function. Raises
    SurgeryError: transformers does not load the model, or logits depend on splits or on other rows.
    """
    model = whole_model(model_folder(reader), dtype=torch.float32).to(opened.stream.device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(opened.config.vocab_size, (1, LENGTH), generator=generator).to(model.device)
    whole = model(ids).logits
    entries, spread = layer_entries(reader.config), float(whole.std())
    quantized = bool(reader.config.get("kv_cache"))
    rounds = quantized or any(entry.quantizes for entry in entries)

    def compare(other: Tensor, how: str) -> None:
        difference = float((other - whole[:, -other.shape[1] :]).abs().max()) / max(spread, 1e-30)
        if not difference <= (QUANTIZED_TOLERANCE if rounds else WHOLE_TOLERANCE):
            raise SurgeryError(
                f"logits {how} differ by {difference:.1e} of their standard deviation from those of one pass"
            )

    by_layers = opened.stream.logits(run_layers(opened.stream, ids.cpu(), None)[:, -1:].to(opened.stream.device))
    if not quantized:
        compare(by_layers.to(whole), "of layers run one by one")
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, **{CACHE: cache}).logits for piece in ids.split(PIECES, dim=1)]
        compare(torch.cat(pieces, dim=1), "of a prompt in pieces")
    padding = 0 if quantized else PADDING
    rows = torch.cat([torch.cat([ids.new_zeros(1, padding), ids], dim=1), torch.cat([ids, ids[:, :padding]], dim=1)])
    mask = torch.ones_like(rows)
    mask[0, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # like `generate`
    batched = model(rows, attention_mask=mask, position_ids=positions).logits[:1, -LENGTH:]
    compare(batched, "of a row next to another")
    ways = [] if quantized else ["layer by layer", "in pieces"]
    ways.append("next to another row" if quantized else "left-padded next to another row")
    return f"{type(model).__name__}: equal logits {', '.join(ways)}"
