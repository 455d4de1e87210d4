"""``surgery heads``: scoring of a model's KV heads with every seed, and writing of the pattern."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import LongTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.architectures.custom_class import layer_entries
from surgery.architectures.hybrid import StreamableModel
from surgery.calibration.mixture import TEXTS, named_text
from surgery.calibration.sequences import SequenceRequest, build_calibration, token_hash
from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.output_path import output_lock
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.evaluation.models import Checkpoint, cast
from surgery.families import family_of
from surgery.families.fused import FUSED
from surgery.heads.heat_map import save_head_map
from surgery.heads.methods import scorer
from surgery.heads.needles import NeedleSet, needle_sequences
from surgery.heads.pattern import HeadPattern
from surgery.heads.pattern_path import check_pattern, default_pattern
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.heads.settings import HeadSettings
from surgery.model.latent_entry import LatentEntry
from surgery.reporting.report import environment
from surgery.running.loading import load_config
from surgery.running.overflow import overflow
from surgery.running.source import checked_device

LENGTH = 4_096
"""Default sequence length, unless half of the model's limit is less. Retrieval heads already show at half of the limit,
where attention costs a quarter: tested on the demo model only."""

MISSED = 3
"""Default sequences are at least this many times longer than a streaming head's view, up to the model's limit."""


@dataclass(frozen=True)
class ScoredHeads:
    """Result of a scoring: pattern file and heat map next to it."""

    path: Path
    heat_map: Path
    pattern: HeadPattern


def score_heads(
    source: str | Path,
    out: str | Path | None = None,
    settings: HeadSettings | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ScoredHeads:
    """Score every KV head of a checkpoint and write the pattern file, with a heat map next to it.

    Args:
        source: local folder or hub id.
        out: file to write, NAME.safetensors, with NAME.png next to it; default: the source's name followed by
            "-heads-METHOD".
        settings: default :class:`HeadSettings`.
        overwrite: replace existing files.
        progress: progress bars; silent if None.

    Raises:
        SurgeryError: the model cannot be scored, the text cannot be read, or the output exists, cannot be written or is
            being written by another process.
    """
    settings, progress = settings or HeadSettings(), progress or Progress(silent=True)
    out = Path(out).expanduser() if out else default_pattern(source, settings.method)
    heat_map = check_pattern(out, overwrite)
    with disk_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    with output_lock(out):
        pattern = _score_seeds(Checkpoint.open(str(source)), settings, progress)
        pattern.save(out, overwrite=overwrite)
        save_head_map(heat_map, pattern)
    return ScoredHeads(out, heat_map, pattern)


def _score_seeds(checkpoint: Checkpoint, settings: HeadSettings, progress: Progress) -> HeadPattern:
    """Score with every seed."""
    check_scorable(checkpoint)
    settings = replace(settings, length=sequence_length(settings, checkpoint.reader.config))
    score = scorer(settings.method)
    tokenizer = checkpoint.tokenizer()
    model = load_model(checkpoint, checked_device(settings.device), settings)
    texts, scores, begin = Texts(tokenizer, settings), [], time.perf_counter()
    for seed in range(settings.seed, settings.seed + settings.seeds):
        session = ScoringSession(model, tokenizer, settings, texts.text(seed), texts.needles(seed), seed, progress)
        with progress.at(f"seed {len(scores) + 1} of {settings.seeds}") if settings.seeds > 1 else nullcontext():
            scores.append(score(session))
        if not all(part.isfinite().all() for part in (scores[-1].scores, *scores[-1].parts.values())):
            raise overflow(checkpoint.reader, "scores of heads")
    return _pattern(scores, settings, checkpoint, texts, time.perf_counter() - begin)


def sequence_length(settings: HeadSettings, config: dict) -> int:
    """Return the sequence length in tokens: the setting, or the default for the model's limit.

    Raises SurgeryError: the length exceeds the model's limit, or sinks and recent tokens cover it.
    """
    limit = config.get("max_position_embeddings") or settings.length or 2 * LENGTH
    visible = settings.sinks + settings.recent
    length = settings.length or min(limit, max(min(limit // 2, LENGTH), MISSED * visible))
    if length > limit:
        raise SurgeryError(f"--length {length}: the model supports at most {limit} tokens")
    if length <= visible:
        raise SurgeryError(
            f"sequences of {length} tokens are not longer than {settings.sinks} sinks and {settings.recent} recent "
            "tokens, so no head would miss a token; raise --length or lower --sinks and --window"
        )
    return length


def check_scorable(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the numbers of layers and KV heads of a model whose heads can be scored.

    Raises SurgeryError: its heads cannot stream one by one; the message has the reason and a remedy.
    """
    from surgery.model.cache_layer import check_full_attention

    config, name = checkpoint.reader.config, checkpoint.source
    entries = layer_entries(config) if config.get("attention_layers") else []
    if config.get("model_type") == "deepseek_v3" or any(isinstance(entry, LatentEntry) for entry in entries):
        raise SurgeryError(f"{name}: the heads of MLA share one latent and cannot stream one by one; score its source")
    if any(entry.streams for entry in entries):
        raise SurgeryError(f"{name}: some heads stream already; score its source")
    if config.get("kv_cache"):
        raise SurgeryError(f"{name}: its KV cache is quantized; score its source")
    if not config.get("attention_layers") and config.get("model_type") not in FUSED:
        family_of(config)  # raises for unknown families: scorers would ignore their caps and sinks
    loaded = load_config(checkpoint.reader.path)
    try:
        check_full_attention(loaded, "a pattern of full and streaming heads")
    except ValueError as error:
        raise SurgeryError(f"{name}: {error}") from None
    model = StreamableModel.of(checkpoint.reader.path, config, loaded)
    return model.layers, model.kv_heads


def load_model(checkpoint: Checkpoint, device: torch.device, settings: HeadSettings) -> PreTrainedModel:
    """Load the model on the device, in the scoring's dtype and with frozen parameters.

    Raises SurgeryError: it cannot be loaded.
    """
    model = checkpoint.load(device)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    cast(model, getattr(torch, dtype))
    model.requires_grad_(False)
    return model


@dataclass
class Texts:
    """Natural text and sequences with needles by seed, and hashes of all returned sequences."""

    tokenizer: PreTrainedTokenizerBase
    settings: HeadSettings
    hashes: set[str] = field(default_factory=set)

    def text(self, seed: int) -> Callable[[int], LongTensor]:
        """Return a function of n that returns windows of natural text, [n, T]."""

        @cache
        def windows(count: int) -> LongTensor:
            return self._hashed(self._windows(count, seed, "tokenizer"))

        return windows

    def needles(self, seed: int) -> Callable[[int], NeedleSet]:
        """Return a function of n that returns n sequences with planted facts."""

        @cache
        def sequences(count: int) -> NeedleSet:
            length, facts = self.settings.length, self.settings.facts
            # At least two windows: the filler must be longer than a sequence.
            filler = self._windows(max(count, 2), seed, None).flatten().tolist()
            rows = needle_sequences(self.tokenizer, filler, count, length, facts, seed)
            self._hashed(rows.tokens)
            return rows

        return sequences

    @property
    def sha256(self) -> str | None:
        """Hash of all returned sequences; None if there are none."""
        return hashlib.sha256("".join(sorted(self.hashes)).encode()).hexdigest() if self.hashes else None

    def _windows(self, count: int, seed: int, bos: Literal["tokenizer"] | None) -> LongTensor:
        settings, length = self.settings, self.settings.length
        request = SequenceRequest(count * length, length, 0.0, seed, 0, settings.text_field)
        if settings.text in TEXTS:
            return named_text(self.tokenizer, settings.text, count, 0, request, bos=bos).tokens
        return build_calibration(self.tokenizer, settings.text, request, bos=bos).tokens

    def _hashed(self, tokens: LongTensor) -> LongTensor:
        self.hashes.add(token_hash(tokens))
        return tokens


def _pattern(
    head_scores: list[HeadScores], settings: HeadSettings, checkpoint: Checkpoint, texts: Texts, seconds: float
) -> HeadPattern:
    """Build the pattern of mean scores over seeds and their spread; parts and facts are the first seed's."""
    stacked = torch.stack([scores.scores for scores in head_scores]).double()
    return HeadPattern(
        scores=stacked.mean(0).float(),
        method=settings.method,
        sinks=settings.sinks,
        recent=settings.recent,
        spread=stacked.std(0).float() if len(head_scores) > 1 else None,
        parts=head_scores[0].parts,
        settings=settings.to_dict(),
        facts=head_scores[0].facts,
        data_sha256=texts.sha256,
        model={"name": checkpoint.source_name, "sha256": checkpoint.sha256, "config_sha256": checkpoint.config_sha256},
        seeds=tuple(range(settings.seed, settings.seed + settings.seeds)),
        seconds=round(seconds, 2),
        versions=environment(),
    )
