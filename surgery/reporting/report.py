"""Conversion report: the record that is written as JSON and rendered as tables and as the model card."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from surgery.checkpoint.disk import read_json
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.errors import SurgeryError
from surgery.families.base import head_shape
from surgery.reporting.healing_table import check_healing
from surgery.running.kv_bytes import kv_bytes_of
from surgery.version import __version__

SCHEMA = 1
PACKAGES = ("torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class Report:
    """Report of one conversion, with plain values only.

    Attributes:
        source: name of the source (for the hub also id and revision), content hash, shape and dtype, and the format
            that its weights were dequantized from.
        target: structure, model class with the reasons for it, and the engines that load it.
        kv: KV bytes per token of the source, and of the result as predicted and measured.
        splits: budget splits that were tried, with their held-out losses.
        ladder: loss in nats per token and recall after each stage, on held-out calibration text.
        verification: largest logit differences in the checks of the written checkpoint.
        seconds, phase_peak_bytes: duration and peak resident memory of each phase; old reports lack the latter.
        previous: report of the source, if it was converted itself.
        healing: record of later recovery training, if any.
        files: SHA-256 of every file except report and card.
        other_files: names of the files that are not in ``files``, such as the card.
        source_files: other files of the source: templates and code that were copied, and files that were left out.
        probe: a few logits computed when the checkpoint was written (:mod:`surgery.verification.probe`).
        phase_flops: FLOPs of model runs in each phase, predicted from shapes.
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
    other_files: list[str] | None = None
    source_files: dict[str, list[str]] | None = None
    probe: dict | None = None
    phase_peak_bytes: dict[str, int] | None = None
    phase_flops: dict[str, int] | None = None

    @classmethod
    def of(cls, record: dict) -> Report:
        """Create a report from the record of any version; unknown entries are dropped."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in names})

    def to_dict(self) -> dict:
        return {"schema": SCHEMA, "surgery_version": __version__, **asdict(self)}

    def card(self, name: str, *, base_model: str | None = None, inherited: dict | None = None) -> str:
        """Render the model card; see :func:`surgery.reporting.front_matter.front_matter` for the arguments."""
        from surgery.reporting.card import model_card

        return model_card(self, name, base_model=base_model, inherited=inherited)


@dataclass(frozen=True)
class SourceShape:
    """Shape of the source's attention; ``dtype`` is the dtype of its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_bytes_per_token: float

    @classmethod
    def of(cls, opened) -> SourceShape:
        """Return the shape of an opened checkpoint, with the KV bytes of one token."""
        first = opened.first
        kv_bytes = kv_bytes_of(opened.reader.config, first.o.dtype)(1)
        return cls(first.heads, first.kv_heads, first.head_dim, first.o.dtype, kv_bytes)

    @classmethod
    def of_config(cls, config, dtype: torch.dtype, kv_bytes_per_token: float) -> SourceShape:
        """Return the shape by a config; a converted checkpoint has the heads of its original source."""
        return cls(*head_shape(config), dtype, kv_bytes_per_token)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert the exceptions that a damaged report raises in the block to a SurgeryError.

    Raises SurgeryError: a value is missing or has the wrong type.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise SurgeryError.at(path, f"damaged ({reason}); download it again, or convert its source again") from error


def read_report(folder: Path) -> dict | None:
    """Read the report in a checkpoint's folder, with the nested reports of its sources; None if there is no file.

    Reports are untrusted input: the types of all values that tables and model cards show are checked. Raises
    SurgeryError: the report cannot be read or is damaged.
    """
    path = folder / REPORT
    if not path.is_file():
        return None
    report = read_json(path)
    with reading(path):
        stage: dict | None = report
        while stage is not None:
            _check_source(stage["source"])
            if stage.get("healing") is not None:
                check_healing(stage["healing"])
            Report.of(stage).card(folder.name)
            stage = stage.get("previous")
    return report


def _check_source(source: dict) -> None:
    texts = {"path": source["path"], "sha256": source["sha256"]}
    texts |= {name: source[name] for name in ("hub", "revision") if source.get(name) is not None}
    for name, text in texts.items():
        if not isinstance(text, str) or "\0" in text:
            raise TypeError(f"source.{name} is not text")


def previous_report(folder: Path) -> dict | None:
    """Return the report in a checkpoint's folder; None if it is missing or damaged."""
    try:
        return read_report(folder)
    except SurgeryError:
        return None


def environment() -> dict[str, str]:
    """Return the versions of Python, platform and packages, on which results may depend."""
    return {"python": platform.python_version(), "platform": platform.platform(), **_versions()}


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the installed `PACKAGES`; cached, so metadata is read once per process."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return versions
