"""The record of a conversion: one structure, written as JSON, shown as tables, told in a model card."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from surgery.calibration.held_out import Score
from surgery.checkpoint.carry_over import REPORT
from surgery.checkpoint.disk import read_json
from surgery.checkpoint.hub import id_of_snapshot
from surgery.common.errors import SurgeryError
from surgery.common.memory import peak_memory
from surgery.families.base import head_shape
from surgery.version import __version__

SCHEMA = 1
PACKAGES = ("torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class Report:
    """Everything worth knowing of one conversion; plain values only.

    Attributes:
        source: where it came from (a name; of the hub also its id and revision), its content hash, shape and dtype, and
            what its weights were dequantised from.
        target: the structure, the class that carries it and why, and which engines load it.
        kv: bytes per token of the source, predicted and measured of the result; of hybrid models also the most that
            keys and values took, as a share of the source's, and the share of full attention that was computed.
        ladder: loss in nats per token and recall after each stage, on held-out calibration text.
        splits: budget splits that were tried, with their held-out losses.
        seconds, phase_peak_bytes: of every phase; the most resident memory during it, where reports have it.
        phase_flops: operations of the model's runs in a phase, as counted from shapes beforehand; those of matrices in
            float64 are not among them.
        previous: the source's own report, where it was converted itself.
        healing: what recovery training did to it since, where there was one.
        files: SHA-256 of every file but report and card.
        probe: a few logits that it computed when it was written (:mod:`surgery.verification.probe`).
    """

    source: dict
    target: dict
    settings: dict
    command: str
    calibration: dict
    kv: dict
    splits: list[dict]
    ladder: list[dict]
    layers: list
    verification: dict
    environment: dict
    seconds: dict[str, float]
    peak_memory_bytes: int
    previous: dict | None = None
    healing: dict | None = None
    files: dict[str, str] | None = None
    probe: dict | None = None
    phase_peak_bytes: dict[str, int] | None = None
    phase_flops: dict[str, int] | None = None

    def to_dict(self) -> dict:
        return {"schema": SCHEMA, "surgery_version": __version__, **asdict(self)}

    def card(self, name: str, *, base_model: str | None = None, inherited: dict | None = None) -> str:
        """The model card; of what is its head, :func:`surgery.reporting.front_matter.front_matter`."""
        from surgery.reporting.card import model_card

        return model_card(self, name, base_model=base_model, inherited=inherited)


@dataclass(frozen=True)
class SourceShape:
    """What a report says of the source's attention; ``dtype`` is that of its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_bytes_per_token: float

    @classmethod
    def of(cls, opened) -> SourceShape:
        """Of a checkpoint of a family."""
        first = opened.first
        kv_bytes = first.kv_width * (opened.layers - len(opened.stateful)) * first.o.dtype.itemsize
        return cls(first.heads, first.kv_heads, first.head_dim, first.o.dtype, kv_bytes)

    @classmethod
    def of_config(cls, config, dtype: torch.dtype, kv_bytes_per_token: float) -> SourceShape:
        """Of any checkpoint whose bytes are known; one converted before has the heads of its own source."""
        return cls(*head_shape(config), dtype, kv_bytes_per_token)


def previous_report(folder: Path) -> dict | None:
    """The report beside a checkpoint's weights, if it was converted and the report can be read."""
    try:
        return read_json(folder / REPORT)
    except SurgeryError:
        return None


def build_report(
    opened,
    settings,
    command: str,
    target: dict,
    splits: list[dict],
    texts,
    scores: dict[str, Score],
    layers: list,
    verification,
    progress,
    *,
    shape: SourceShape | None = None,
) -> Report:
    """Puts a finished conversion on record.

    Args:
        target: what it became; the keys that all targets have are "to", "method", "model_type", "reasons", "engines",
            "dtype" and "bytes_per_token", as predicted.
        layers: a dataclass a layer, with the errors of each stage as ``measured``.
        shape: of the source, where it is no checkpoint of a family.
    """
    reader = opened.reader
    with progress.phase("hash the source", sum(reader.info(n).nbytes for n in reader.names()), "B") as advance:
        fingerprint = reader.fingerprint(advance)
    shape, hub = shape or SourceShape.of(opened), id_of_snapshot(reader.source)
    source_bytes = shape.kv_bytes_per_token
    target = dict(target)
    predicted = target.pop("bytes_per_token")
    ladder = [{"stage": stage, **asdict(score)} for stage, score in scores.items()]
    ladder.append({"stage": "reloaded", **asdict(verification.score)})
    return Report(
        source={
            "path": hub[0].partition("/")[2] if hub else reader.source.name,
            **({"hub": hub[0], "revision": hub[1]} if hub else {}),
            "dequantised_from": reader.dequantised_from,
            "sha256": fingerprint,
            "model_type": reader.config["model_type"],
            "layers": opened.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype": str(shape.dtype).removeprefix("torch."),
        },
        target=target,
        settings=settings.to_dict(),
        command=command,
        calibration=texts.description,
        kv={
            "source_bytes_per_token": source_bytes,
            "predicted_bytes_per_token": predicted,
            "measured_bytes_per_token": verification.kv_bytes_per_token,
            "measured_at_tokens": verification.kv_tokens,
            "ratio": verification.kv_bytes_per_token / source_bytes,
            **_flow(verification, shape, settings),
        },
        splits=splits,
        ladder=ladder,
        layers=layers,
        verification={
            "logit_difference_to_simulation": verification.logit_difference,
            "cached_decode_difference": verification.cache_difference,
        },
        environment=environment(),
        seconds={name: round(seconds, 2) for name, seconds in progress.seconds.items()},
        peak_memory_bytes=peak_memory(),
        previous=previous_report(reader.path),
        probe=verification.probe,
        phase_peak_bytes=dict(progress.peaks),
        phase_flops={name: flops for name, flops in progress.expected.items() if name in progress.seconds},
    )


def _flow(verification, shape: SourceShape, settings) -> dict[str, float]:
    """Peak and footprint, where they were looked at: measured, and equal to what was predicted."""
    if verification.flow is None:
        return {}
    run, stored = getattr(torch, settings.dtype).itemsize, shape.dtype.itemsize
    whole = shape.kv_bytes_per_token * verification.kv_tokens / stored * run
    return {"peak_ratio": verification.flow.peak_bytes / whole, "footprint": verification.flow.footprint}


def environment() -> dict[str, str]:
    """Versions that a result may depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
