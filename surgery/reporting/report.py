"""The record of a conversion: one structure, written as JSON, shown as tables, told in a model card."""

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
    """Everything worth knowing of one conversion; plain values only.

    Attributes:
        source: where it came from (a name; of the hub also its id and revision), its content hash, shape and dtype, and
            what its weights were dequantized from.
        target: the structure, the class that carries it and why, and which engines load it.
        kv: bytes per token of the source, predicted and measured of the result; of hybrid models also the most that
            keys and values took, as a share of the source's, and the share of full attention that was computed.
        ladder: loss in nats per token and recall after each stage, on held-out calibration text.
        splits: budget splits that were tried, with their held-out losses.
        seconds, phase_peak_bytes: of every phase; the most resident memory during it, where reports have it.
        phase_flops: operations of the model's runs in a phase, as forecast from shapes.
        previous: the source's own report, where it was converted itself.
        healing: what recovery training did to it since, where there was one.
        files: SHA-256 of every file but report and card.
        other_files: SHA-256 of what is not in ``files``, such as the card; None of a large file.
        source_files: of the source's other files, the templates and code that were taken over, and what was left out.
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
    other_files: dict[str, str | None] | None = None
    source_files: dict[str, list[str]] | None = None
    probe: dict | None = None
    phase_peak_bytes: dict[str, int] | None = None
    phase_flops: dict[str, int] | None = None

    @classmethod
    def of(cls, record: dict) -> Report:
        """Read a report that any version wrote."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in names})

    def to_dict(self) -> dict:
        return {"schema": SCHEMA, "surgery_version": __version__, **asdict(self)}

    def card(self, name: str, *, base_model: str | None = None, inherited: dict | None = None) -> str:
        """The model card; of what is its head, :func:`surgery.reporting.front_matter.front_matter`."""
        from surgery.reporting.card import model_card

        return model_card(self, name, base_model=base_model, inherited=inherited)


@dataclass(frozen=True)
class SourceShape:
    """Shape of the source's attention in a report; ``dtype`` is that of its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_bytes_per_token: float

    @classmethod
    def of(cls, opened) -> SourceShape:
        """Return the shape of a checkpoint of a family; its KV bytes at an infinite window."""
        first = opened.first
        kv_bytes = kv_bytes_of(opened.reader.config, first.o.dtype)(1)
        return cls(first.heads, first.kv_heads, first.head_dim, first.o.dtype, kv_bytes)

    @classmethod
    def of_config(cls, config, dtype: torch.dtype, kv_bytes_per_token: float) -> SourceShape:
        """Return the shape of any checkpoint whose bytes are known; one converted before has the heads of its own
        source."""
        return cls(*head_shape(config), dtype, kv_bytes_per_token)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a damaged report raises in the block into one line.

    Raises:
        SurgeryError: a value is missing, or is of another type than conversions write.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise SurgeryError.at(path, f"damaged ({reason}); download it again, or convert its source again") from error


def read_report(folder: Path) -> dict | None:
    """Read the report next to a checkpoint's weights, and those of its sources in it; None where there is none.

    Whoever sent it, what tables and model cards show of it has the right types.

    Raises:
        SurgeryError: it cannot be read, or is damaged.
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
            raise TypeError(f"source.{name} is no text")


def previous_report(folder: Path) -> dict | None:
    """The report next to a checkpoint's weights, if it was converted and the report can be read."""
    try:
        return read_report(folder)
    except SurgeryError:
        return None


def environment() -> dict[str, str]:
    """Versions that a result may depend on."""
    return {"python": platform.python_version(), "platform": platform.platform(), **_versions()}


@cache
def _versions() -> dict[str, str]:
    """Versions of the installed packages, whose metadata is read once a process."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return versions
