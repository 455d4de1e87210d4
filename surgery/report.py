"""The record of a conversion: one structure, written as JSON, shown as tables, told in a model card."""

from __future__ import annotations

import platform
import resource
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from surgery.held_out import Score
from surgery.version import __version__

SCHEMA = 1
PACKAGES = ("torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class Report:
    """Everything worth knowing of one conversion; plain values only.

    Attributes:
        source: where it came from, its content hash, shape and dtype.
        target: the structure, the class that carries it and why, and which engines load it.
        kv: bytes per token of the source, predicted and measured of the result.
        ladder: loss in nats per token and recall after each stage, on held-out calibration text.
        splits: budget splits that were tried, with their held-out losses.
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

    def to_dict(self) -> dict:
        return {"schema": SCHEMA, "surgery_version": __version__, **asdict(self)}

    def card(self, name: str) -> str:
        """The model card."""
        from surgery.card import model_card

        return model_card(self, name)


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
) -> Report:
    """Puts a finished conversion on record.

    Args:
        target: what it became; the keys that all targets have are "to", "method", "model_type", "reasons", "engines",
            "dtype" and "bytes_per_token", as predicted.
        layers: a dataclass a layer, with the errors of each stage as ``measured``.
    """
    reader = opened.reader
    with progress.phase("hash the source", sum(reader.info(n).nbytes for n in reader.names()), "B") as advance:
        fingerprint = reader.fingerprint(advance)
    first = opened.anatomy(0)
    source_bytes = first.kv_width * opened.layers * first.q.dtype.itemsize
    target = dict(target)
    predicted = target.pop("bytes_per_token")
    ladder = [{"stage": stage, **asdict(score)} for stage, score in scores.items()]
    ladder.append({"stage": "reloaded", **asdict(verification.score)})
    return Report(
        source={
            "path": reader.path.name,
            "sha256": fingerprint,
            "model_type": reader.config["model_type"],
            "layers": opened.layers,
            "heads": first.heads,
            "kv_heads": first.kv_heads,
            "head_dim": first.head_dim,
            "dtype": str(first.q.dtype).removeprefix("torch."),
        },
        target=target,
        settings=settings.to_dict(),
        command=command,
        calibration=texts.description,
        kv={
            "source_bytes_per_token": source_bytes,
            "predicted_bytes_per_token": predicted,
            "measured_bytes_per_token": verification.kv_bytes_per_token,
            "ratio": verification.kv_bytes_per_token / source_bytes,
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
    )


def environment() -> dict[str, str]:
    """Versions that a result may depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
