"""``surgery convert --to gqa`` and ``--to mqa``: fewer KV heads, in a plain checkpoint of the source's own family.

The order of events is that of :mod:`surgery.convert`: statistics from two sweeps over calibration text, then one pass
that merges the heads of every layer, fits it, carries all stages through it and writes it; the written files are loaded
again, run and compared before they get their final name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery import layer_statistics
from surgery.anatomy import AttentionAnatomy
from surgery.architectures.own_family import (
    ENGINES,
    OWN_FAMILY,
    attention_tensors,
    config_with_heads,
    planned_attention,
)
from surgery.attention import CapturedAttention
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.sweep import BoundaryStore
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.conversion import Conversion, Outcome, finish, open_request
from surgery.errors import SurgeryError
from surgery.ladder import Ladder
from surgery.layer_stream import LayerStream
from surgery.progress import Progress
from surgery.sequential_fit import SequentialFit, Solve
from surgery.settings import KVHeadsSettings
from surgery.source import Source
from surgery.texts import load_texts
from surgery.transforms.kv_heads import METHODS, MergedLayer, merge_kv_heads
from surgery.transforms.kv_heads_fit import fit_merged_layer

STAGES = ("merged", "fitted")


@dataclass(frozen=True)
class HeadsLayerReport:
    """One layer of the report.

    Attributes:
        groups: the source's KV heads that each KV head stands for.
        key_error, value_error: predicted, before the fit; see :class:`surgery.transforms.kv_heads.MergedLayer`.
        measured: relative error of the layer's own output on the source's inputs, at each lossy stage.
    """

    layer: int
    groups: tuple[tuple[int, ...], ...]
    key_error: float
    value_error: float
    measured: dict[str, float]


def convert_to_gqa(
    source: str | Path,
    out: str | Path | None = None,
    settings: KVHeadsSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Merges KV heads and writes a checkpoint of the source's family with fewer of them.

    Args:
        source: local folder or hub id.
        out: folder to write; the source's name with "-gqa" or "-mqa" behind it by default.
        settings: default :class:`KVHeadsSettings`.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: bad input or an impossible request; nothing is left behind.
    """
    settings, progress = settings or KVHeadsSettings(), progress or Progress(silent=True)
    target = "mqa" if settings.kv_heads == 1 else "gqa"
    opened, out = open_request(source, out, target, settings, overwrite=overwrite, allow_pickle=allow_pickle)
    first = opened.anatomy(0)
    kv_heads = wanted_heads(settings, first)
    weighted = METHODS[settings.method].weighted
    texts = load_texts(opened, settings, progress)
    with StatisticsLibrary() as library, BoundaryStore() as store:
        # The errors that the report predicts are in the metric of the loss, whatever metric the method works in.
        layer_statistics.gather(opened, library, texts.calibration, store, settings, progress, gradients=True)
        tensors = _planned_tensors(opened, kv_heads, first.head_dim)
        with CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite) as writer:
            fit = None
            if weighted and texts.calibration is not None and settings.fit_steps:
                fit = SequentialFit(opened.stream, store, texts.calibration, settings.batch_size)
            stages = STAGES if fit else STAGES[:1]
            ladder = Ladder(opened.stream, texts.held_out, settings.batch_size, stages)
            layers = _merge_layers(opened, kv_heads, library, fit, ladder, writer, settings, progress)
            width = kv_heads * (first.head_dim + first.value_dim) * opened.layers * first.q.dtype.itemsize
            outcome = Outcome(
                config=config_with_heads(opened.reader.config, kv_heads),
                replaced=_replaced_names(opened),
                target={
                    "to": "mqa" if kv_heads == 1 else "gqa",
                    "method": settings.method,
                    "model_type": opened.reader.config["model_type"],
                    "reasons": [OWN_FAMILY],
                    "kv_heads": kv_heads,
                    "engines": ENGINES,
                },
                kv_bytes=lambda tokens: width * tokens,
                layers=layers,
                scores=ladder.scores(),
                simulated=ladder.hidden[stages[-1]],
            )
            report = finish(writer, tensors, opened, settings, texts, outcome, command, progress)
    return Conversion(writer.out, report)


def wanted_heads(settings: KVHeadsSettings, anatomy: AttentionAnatomy) -> int:
    """KV heads to keep: as many as were asked for, or the most that the ratio allows.

    Raises:
        SurgeryError: the layer cannot be merged at all, or not to that number.
    """
    if anatomy.q_norm is not None or anatomy.k_norm is not None:
        raise SurgeryError(
            "KV heads behind a q/k-norm cannot be merged, no factor of a head passes the norm: convert --to mla instead"
        )
    heads = anatomy.kv_heads
    if heads == 1:
        raise SurgeryError("the source has one KV head already: convert --to mla instead")
    choices = [count for count in range(1, heads) if heads % count == 0]
    if settings.kv_heads is not None:
        if settings.kv_heads not in choices:
            raise SurgeryError(
                f"--kv-heads {settings.kv_heads}: the source's {heads} can become {', '.join(map(str, choices))}"
            )
        return settings.kv_heads
    ratio = 0.5 if settings.kv_ratio is None else settings.kv_ratio
    fitting = [count for count in choices if count <= ratio * heads]
    if not fitting:
        raise SurgeryError(
            f"--kv-ratio {ratio:g}: one of the source's {heads} KV heads is more; convert --to mla instead"
        )
    return fitting[-1]


def _merge_layers(
    opened: Source,
    kv_heads: int,
    library: StatisticsLibrary,
    fit: SequentialFit | None,
    ladder: Ladder,
    writer: CheckpointWriter,
    settings: KVHeadsSettings,
    progress: Progress,
) -> list[HeadsLayerReport]:
    """Merges, fits, measures and writes one layer after the other."""
    stream, reports = opened.stream, []
    with progress.phase("convert", opened.layers) as advance:
        for index in range(opened.layers):
            source = opened.anatomy(index)
            anatomy = source.to(torch.float64)
            statistics = library.load(index)[0]
            merged = merge_kv_heads(anatomy, statistics, kv_heads, settings.method)
            attention = CapturedAttention(merged.anatomy.to(stream.device, stream.dtype))
            forms = {"merged": attention}
            with stream.layer(index) as layer:
                if fit:
                    solve = _solver(merged, statistics.output_gradient, index, stream, settings)
                    forms["fitted"] = attention = fit.fit(index, layer, anatomy, solve)
                errors = ladder.advance(
                    layer, anatomy, {name: lambda form=form: form for name, form in forms.items()}, forms
                )
            result = attention.anatomy.to("cpu", source.q.dtype)
            for name, tensor in attention_tensors(result, index).items():
                writer.write(name, tensor)
            reports.append(HeadsLayerReport(index, merged.groups, merged.key_error, merged.value_error, errors))
            advance()
    return reports


def _solver(merged: MergedLayer, metric: Tensor, index: int, stream: LayerStream, settings: KVHeadsSettings) -> Solve:
    """The least-squares problem of one layer, from its closed form and the loss gradient's moment [D, D]."""

    def solve(inputs: Tensor, targets: Tensor) -> CapturedAttention:
        fitted, _, _ = fit_merged_layer(
            merged.anatomy.to(stream.device, stream.dtype),
            inputs,
            targets,
            metric.to(stream.device),
            steps=settings.fit_steps,
            iterations=settings.fit_iterations,
            queries=settings.fit_queries,
            seed=settings.seed + index,
        )
        return CapturedAttention(fitted)

    return solve


def _replaced_names(opened: Source) -> set[str]:
    """The attention's tensors; and a copy of tied embeddings, which would only say the same again."""
    names = {name for layer in range(opened.layers) for name in opened.family.attention_names(opened.reader, layer)}
    return names | ({"lm_head.weight"} if opened.config.tie_word_embeddings else set())


def _planned_tensors(opened: Source, kv_heads: int, head_dim: int) -> dict[str, TensorSpec]:
    """Every tensor of the output, in the source's order."""
    reader = opened.reader
    attention: dict[str, TensorSpec] = {}
    for layer in range(opened.layers):
        # Frequencies that some old checkpoints store are the config's own.
        names = [name for name in opened.family.attention_names(reader, layer) if "rotary_emb" not in name]
        attention |= planned_attention(reader, names, layer, kv_heads, head_dim)
    replaced = _replaced_names(opened)
    plan = {}
    for name in reader.names():
        if name in attention:
            plan[name] = attention[name]
        elif name not in replaced:
            plan[name] = TensorSpec(reader.info(name).dtype, reader.info(name).shape)
    return plan
