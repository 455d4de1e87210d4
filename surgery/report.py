"""The record of a conversion: one structure, written as JSON, shown as tables, told in a model card."""

from __future__ import annotations

import platform
import resource
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from surgery.architectures.choose import Carrier, engines
from surgery.held_out import Score
from surgery.transforms.mla import ConvertedLayer, Split
from surgery.version import __version__

SCHEMA = 1
PACKAGES = ("torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class LayerReport:
    """Errors of one layer, predicted from statistics and measured on held-out text.

    Attributes:
        rope_error: predicted share of the squared scores lost with the dropped rotations.
        latent_error: predicted squared error of the truncated latent in the method's metric.
        latent_error_share: the same relative to the latent's whole energy.
        measured: relative error of the layer's own output on the source's inputs, at each lossy stage.
    """

    layer: int
    rank: int
    rope_dim: int
    rope_error: float | None
    latent_error: float
    latent_error_share: float
    measured: dict[str, float]

    @classmethod
    def of(cls, layer: int, converted: ConvertedLayer, errors: dict[str, float]) -> LayerReport:
        return cls(
            layer,
            converted.truncated.rank,
            converted.truncated.rope_dim,
            converted.rope_error,
            converted.latent_error,
            converted.latent_error / max(float(converted.energy.sum()), 1e-300),
            errors,
        )


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
    layers: list[LayerReport]
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
    plan,
    tried: list[tuple[Split, float | None]],
    carrier: Carrier,
    texts,
    scores: dict[str, Score],
    layers: list[LayerReport],
    verification,
    progress,
) -> Report:
    """Puts a finished conversion on record."""
    reader, writer = opened.reader, carrier.writer
    itemsize = writer.spec.dtype.itemsize
    with progress.phase("hash the source", sum(reader.info(n).nbytes for n in reader.names()), "B") as advance:
        fingerprint = reader.fingerprint(advance)
    first = opened.anatomy(0)
    source_bytes = first.kv_width * opened.layers * itemsize
    predicted = sum(writer.kv_width(layer) for layer in range(opened.layers)) * itemsize
    ladder = [{"stage": stage, **asdict(score)} for stage, score in scores.items()]
    ladder.append({"stage": "reloaded", **asdict(verification.score)})
    method = plan.method.name
    return Report(
        source={
            "path": reader.path.name,
            "sha256": fingerprint,
            "model_type": reader.config["model_type"],
            "layers": opened.layers,
            "heads": first.heads,
            "kv_heads": first.kv_heads,
            "head_dim": first.head_dim,
            "dtype": str(writer.spec.dtype).removeprefix("torch."),
        },
        target={
            "to": "mla",
            "method": method,
            "model_type": "deepseek_v3" if carrier.stock else "surgery",
            "reasons": list(carrier.reasons),
            "kv_lora_rank": layers[0].rank if writer.spec.uniform else None,
            "kv_lora_ranks": list(writer.spec.ranks),
            "rope_dim": layers[0].rope_dim,
            "inverse_frequencies": writer.spec.inv_freq[0].tolist(),
            "default_rope_theta": writer.theta if carrier.stock else None,
            "latent_norm": writer.norm.kind if carrier.stock else None,
            "residual_rescale": writer.rescale if carrier.stock else None,
            "engines": engines(carrier, reader.config),
        },
        settings=settings.to_dict(),
        command=command,
        calibration=texts.description,
        kv={
            "source_bytes_per_token": source_bytes,
            "predicted_bytes_per_token": predicted,
            "measured_bytes_per_token": verification.kv_bytes_per_token,
            "ratio": verification.kv_bytes_per_token / source_bytes,
        },
        splits=[{**asdict(split), "held_out_loss": loss} for split, loss in tried],
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
