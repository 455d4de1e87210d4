"""``surgery heads compare``: how much patterns agree, and what each is worth when its lowest heads stream."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import BoolTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.calibration.held_out_documents import default_names
from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.checkpoint.output_place import kept_apart
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.session import Session
from surgery.evaluation.models import Checkpoint, cast
from surgery.evaluation.settings import EvalSettings
from surgery.evaluation.store import ResultStore, key_of
from surgery.evaluation.tasks import Tasks, build_tasks
from surgery.heads.comparison import compare
from surgery.heads.heat_map import save_head_maps
from surgery.heads.import_patterns import read_pattern
from surgery.heads.pattern import HeadPattern
from surgery.heads.scoring import OUTLINED, check_scorable
from surgery.heads.settings import CompareRequest
from surgery.heads.streaming import streaming_heads
from surgery.reporting.report import environment
from surgery.running.processes import Processes
from surgery.running.source import process_device
from surgery.version import __version__

SEED = 2
"""Of held-out windows and recall prompts: that of the testbed's report."""

BATCH = 4

DOCUMENT = "comparison.json"
WRITTEN = (DOCUMENT, "comparison.md", "heads.png", "curve.png")

RANDOM = "random"
"""Random patterns are called so, with a number."""


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        content: as written to comparison.json.
        written: the files.
        is_main: whether this is the process that prints.
    """

    content: dict[str, Any]
    written: list[Path]
    is_main: bool = True


def compare_patterns(request: CompareRequest, progress: Progress | None = None) -> Comparison:
    """Compares patterns and writes comparison.json, comparison.md and pictures.

    With several processes (``accelerate launch``) they share the measuring, which goes on where an interrupted
    comparison stopped.

    Raises:
        SurgeryError: a pattern cannot be read, they are of different shapes, the model is not theirs, or the output
            exists or is being written.
    """
    processes = Processes(cpu=request.device == "cpu")
    progress = (progress if processes.is_main else None) or Progress(silent=True)
    named = _named(request.patterns)
    agreement = compare(named)
    measuring = None if request.measure is None else _Measuring.of(request, named)
    with ExitStack() as alone:
        store = processes.from_main(lambda: _settle_output(request, alone, progress))
        content: dict[str, Any] = {
            "title": request.title,
            "surgery_version": __version__,
            "command": request.command,
            "agreement": agreement,
            "scoring": {name: _scoring(pattern) for name, pattern in named.items()},
            "measured": None if measuring is None else _measure(request, named, measuring, store, processes, progress),
            "environment": environment(),
        }
        content = json.loads(json.dumps(content, allow_nan=False))
        written = processes.from_main(lambda: _write(content, named, request.out))
    return Comparison(content, written, processes.is_main)


def publish_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes the files of a comparison into another folder, without the results that it goes on from.

    Raises:
        SurgeryError: they cannot be written there, or would replace files that this program has not written.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        ResultStore(folder).check_files([path.name for path in comparison.written], DOCUMENT)
        return [Path(shutil.copyfile(path, folder / path.name)) for path in comparison.written]


def random_pattern(layers: int, kv_heads: int, seed: int) -> HeadPattern:
    """Scores from a uniform distribution: what a method must be better than."""
    scores = torch.rand(layers, kv_heads, generator=torch.Generator().manual_seed(seed))
    return HeadPattern(scores, RANDOM, seeds=(seed,))


def _settle_output(request: CompareRequest, alone: ExitStack, progress: Progress) -> ResultStore:
    document = request.out / DOCUMENT
    if document.exists() and not request.overwrite:
        raise SurgeryError(f"{document}: exists; choose another --out or pass --overwrite")
    store = ResultStore.open(request.out)
    alone.enter_context(kept_apart(request.out))
    store.check_files(WRITTEN, DOCUMENT)
    if said := store.go_on(torch.get_num_threads(), restart=request.restart):
        progress.note(f"{request.out}: {said}")
    return store


def _write(content: dict[str, Any], named: dict[str, HeadPattern], folder: Path) -> list[Path]:
    from surgery.heads.comparison_report import curve_figure, markdown

    document, page = folder / DOCUMENT, folder / "comparison.md"
    pictures = [save_head_maps(folder / "heads.png", named, OUTLINED)]
    if content["measured"]:
        from surgery.eval.report.style import save_png

        pictures.append(save_png(curve_figure(content), folder / "curve.png"))
    write_whole(page, markdown(content))
    # The last: where it is, a comparison is whole.
    write_whole(document, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    written = [document, page, *pictures]
    ResultStore(folder).record_files(written)
    return written


def _named(given: Sequence[str]) -> dict[str, HeadPattern]:
    patterns: dict[str, HeadPattern] = {}
    for argument in given:
        name, sign, path = argument.partition("=")
        if not sign or Path(argument).exists():
            name, path = Path(argument).stem, argument
        if name in patterns:
            raise SurgeryError(f"two patterns are called {name}: name them, surgery heads compare one=FILE other=FILE")
        if name.startswith(RANDOM + " "):
            raise SurgeryError(f"{argument}: random patterns are called {RANDOM} 1, 2, …; name yours otherwise")
        patterns[name] = read_pattern(path)
    return patterns


def _scoring(pattern: HeadPattern) -> dict[str, Any]:
    """Where a pattern came from."""
    spread = None if pattern.spread is None else pattern.spread.mean().item()
    return {
        "method": pattern.method,
        "seconds": pattern.seconds,
        "seeds": list(pattern.seeds),
        "mean_spread": spread,
        "sinks": pattern.sinks,
        "recent": pattern.recent,
        "sha256": pattern.sha256,
        "settings": dict(pattern.settings),
        "model": dict(pattern.model),
        "best": [list(head) for head in pattern.ranking()[:6]],
    }


@dataclass(frozen=True)
class _Measuring:
    """What is measured, and on what; known before the model is loaded.

    Attributes:
        sinks, recent: of streaming heads.
        length: tokens of a sequence.
    """

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    tasks: Tasks
    sinks: int
    recent: int
    length: int

    @classmethod
    def of(cls, request: CompareRequest, named: dict[str, HeadPattern]) -> _Measuring:
        """Raises SurgeryError where the model cannot be measured with these patterns."""
        sinks, recent = (_agreed(name, getattr(request, name), named) for name in ("sinks", "recent"))
        checkpoint = Checkpoint.open(request.measure)
        _check_shape(check_scorable(checkpoint), next(iter(named.values())), checkpoint.given)
        tokenizer = checkpoint.tokenizer()
        settings = EvalSettings(
            tasks=("loss", "recall"),
            windows=request.windows,
            length=min(request.length, checkpoint.reader.config.get("max_position_embeddings") or request.length),
            decoded=0,
            recall_prompts=request.prompts,
            seed=SEED,
            batch_size=BATCH,
            variants=(),
            data=default_names(tokenizer),
        )
        if settings.length <= sinks + recent:
            raise SurgeryError(
                f"sequences of {settings.length} tokens are no longer than {sinks} sinks and {recent} recent tokens: "
                "no head would miss anything; raise --length or lower --sinks and --window"
            )
        tasks = build_tasks(settings, tokenizer, checkpoint.reader.config, Progress(silent=True))
        return cls(checkpoint, tokenizer, tasks, sinks, recent, settings.length)


def _measure(
    request: CompareRequest,
    named: dict[str, HeadPattern],
    measuring: _Measuring,
    store: ResultStore,
    processes: Processes,
    progress: Progress,
) -> dict[str, Any]:
    """Loss and recall of the model with each pattern's lowest heads streaming, by their share."""
    checkpoint, sinks, recent = measuring.checkpoint, measuring.sinks, measuring.recent
    device = process_device(request.device, processes)
    # As evaluations have it: the checkpoint's own dtype on an accelerator.
    dtype = "float32" if device.type == "cpu" else checkpoint.dtype
    model = checkpoint.load(device)
    if device.type == "cpu":
        cast(model, torch.float32)
    session = Session(measuring.tokenizer, processes, Progress(silent=True), batch_size=BATCH, seed=SEED)
    first = next(iter(named.values()))
    rows = dict(named)
    for number in range(request.random):
        rows[f"{RANDOM} {number + 1}"] = random_pattern(first.layers, first.kv_heads, number)
    identity = {
        "model": checkpoint.sha256,
        "config": checkpoint.config_sha256,
        "tasks": measuring.tasks.settings,
        "dtype": dtype,
        "device": device.type,
        "versions": {name: environment()[name] for name in ("torch", "transformers")},
        "surgery": __version__,
    }

    def measured(streams: BoolTensor) -> dict[str, float]:
        key = key_of({**identity, "streams": streams.int().tolist(), "sinks": sinks, "recent": recent})
        found = processes.from_main(lambda: store.get(key))
        if found is None:
            found = _quality(model, measuring.tasks.all, session, streams, sinks, recent)
            processes.from_main(lambda: store.put(key, found))
        return found

    kept = (sinks + recent - 1) / measuring.length
    shares = tuple(dict.fromkeys(request.shares))
    points = []
    with progress.phase("measure", 1 + len(rows) * len(shares), "plan") as advance:
        source = measured(torch.zeros(first.scores.shape, dtype=torch.bool))
        advance()
        for name, pattern in rows.items():
            for share in shares:
                streams = ~pattern.full_heads(1 - share)
                count = int(streams.sum())
                kv_ratio = 1 - count / streams.numel() * (1 - kept)
                points.append(
                    {"name": name, "share": share, "streaming": count, "kv_ratio": kv_ratio, **measured(streams)}
                )
                advance()
    return {
        "checkpoint": checkpoint.place,
        "sha256": checkpoint.sha256,
        "dtype": dtype,
        "device": device.type,
        "sinks": sinks,
        "recent": recent,
        "length": measuring.length,
        "windows": request.windows,
        "prompts": request.prompts,
        "heads": first.scores.numel(),
        "source": source,
        "points": points,
    }


def _quality(
    model: PreTrainedModel, tasks: Sequence, session: Session, streams: BoolTensor, sinks: int, recent: int
) -> dict[str, float]:
    by_name = {task.name: task for task in tasks}
    with streaming_heads(model, streams, sinks, recent):
        loss = by_name["loss"].run(model, session, None)["loss"]
        recall = by_name["recall"].run(model, session, None)["accuracy"]
    if not math.isfinite(loss):
        raise SurgeryError("the loss is not finite: the model cannot be measured in this dtype")
    return {"loss": loss, "recall": recall}


def _agreed(name: str, given: int | None, named: dict[str, HeadPattern]) -> int:
    """Sinks or recent tokens: as given, or what all patterns were made for."""
    if given is not None:
        return given
    said = {getattr(pattern, name) for pattern in named.values()} - {None}
    if len(said) != 1:
        what = f"say {sorted(said)}" if said else "do not say"
        raise SurgeryError(f"--{name}: the patterns {what}; give one number for all")
    return said.pop()


def _check_shape(shape: tuple[int, int], pattern: HeadPattern, given: str) -> None:
    if shape != (pattern.layers, pattern.kv_heads):
        raise SurgeryError(
            f"{given}: has {shape[0]} layers of {shape[1]} KV heads, the patterns {pattern.layers} of "
            f"{pattern.kv_heads}; score this checkpoint itself with surgery heads"
        )
