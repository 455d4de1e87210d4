"""Report of a finished conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch

from surgery.architectures.multimodal import whole_config
from surgery.checkpoint.hub import id_of_snapshot
from surgery.checkpoint.tensors import TensorSpec
from surgery.common.memory import peak_memory
from surgery.engines.table import engine_table
from surgery.reporting.adapters import adapter_targets
from surgery.reporting.report import Report, SourceShape, environment
from surgery.running.kv_bytes import kv_bytes_of, kv_shares
from surgery.structures.base import Outcome
from surgery.structures.context import ConversionContext
from surgery.structures.registry import TARGETS
from surgery.verification.written import Verification, prompt_of


def build_report(
    work: ConversionContext,
    outcome: Outcome,
    verification: Verification,
    name: str,
    plan: Mapping[str, TensorSpec],
    command: str,
) -> Report:
    """Build the report of a conversion whose files are written and verified, without their names and hashes.

    Args:
        name: name of the output folder, for the commands of engines.
        plan: specs of all written tensors.
        command: command line of the user.
    """
    opened, reader, progress = work.opened, work.opened.reader, work.progress
    shape, hub = outcome.shape or SourceShape.of(opened), id_of_snapshot(reader.source)
    predicted, at = kv_bytes_of(outcome.config, opened.weight_dtype), verification.kv_tokens
    stages = [{"stage": stage, **asdict(score)} for stage, score in outcome.scores.items()]
    stages.append({"stage": "reloaded", **asdict(verification.score)})
    return Report(
        source={
            "path": hub[0].partition("/")[2] if hub else reader.source.name,
            **({"hub": hub[0], "revision": hub[1]} if hub else {}),
            "dequantised_from": reader.dequantised_from,
            "sha256": reader.fingerprint(),
            "model_type": reader.config["model_type"],
            "layers": opened.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype": str(shape.dtype).removeprefix("torch."),
        },
        target=_target(work, outcome, name)
        | {"adapters": adapter_targets({name: spec.shape for name, spec in plan.items()})},
        settings=work.settings.to_dict(),
        command=command,
        calibration=work.texts.description,
        kv={
            "source_bytes_per_token": shape.kv_bytes_per_token,
            "predicted_bytes_per_token": predicted(at, prompt=prompt_of(at)) / at,
            "measured_bytes_per_token": verification.kv_bytes_per_token,
            "measured_at_tokens": at,
            "ratio": verification.kv_bytes_per_token / shape.kv_bytes_per_token,
            "ratio_at": kv_shares(
                outcome.config, opened.weight_dtype, reader.config, shape.dtype, opened.config.max_position_embeddings
            ),
            **_flow(verification, shape, work.settings),
        },
        splits=outcome.splits,
        ladder=stages,
        layers=outcome.layers,
        verification={
            "logit_difference_to_simulation": verification.logit_difference,
            "cached_decode_difference": verification.cache_difference,
        },
        environment=environment(),
        seconds={name: round(seconds, 2) for name, seconds in progress.seconds.items()},
        peak_memory_bytes=peak_memory(),
        probe=verification.probe,
        phase_peak_bytes=dict(progress.peaks),
        phase_flops={name: flops for name, flops in progress.expected.items() if name in progress.seconds},
    )


def _target(work: ConversionContext, outcome: Outcome, name: str) -> dict:
    """Build the report's entry of the target: name, class and the engines that load it."""
    # By the outcome's name, not the settings: a slice keeps its source's target, and kv_heads decides gqa or mqa.
    target, to = TARGETS.get(outcome.target["to"]), outcome.target["to"]
    config = whole_config(work.opened.reader, outcome.final_config or outcome.config)
    return {
        **outcome.target,
        "model_type": config["model_type"],
        "called": getattr(target, "called", to),
        "engines": engine_table(config, name, work.opened.reader.path),
    }


def _flow(verification: Verification, shape: SourceShape, settings) -> dict[str, float]:
    """Return the measured peak and footprint, equal to the prediction; empty if verification measured none."""
    if verification.flow is None:
        return {}
    run, stored = getattr(torch, settings.dtype).itemsize, shape.dtype.itemsize
    whole = shape.kv_bytes_per_token * verification.kv_tokens / stored * run
    return {"peak_ratio": verification.flow.peak_bytes / whole, "footprint": verification.flow.footprint}
