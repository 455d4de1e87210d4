"""Report entries of an MLA conversion: the target and its layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from surgery.architectures.choose import Carrier
from surgery.common.human import share
from surgery.transforms.mla import ConvertedLayer

EXACT_STAGES, LOSSY_STAGES = ("merged", "rotated"), ("partial RoPE", "truncated")
"""Stages of the report after the source."""


@dataclass(frozen=True)
class LayerReport:
    """Errors of one layer, predicted from statistics and measured on held-out text.

    Attributes:
        rank: rank of the latent; 0 for an unchanged layer.
        rope_error: predicted error of the dropped rotations, relative to the squared scores.
        latent_error: predicted squared error of the truncated latent in the method's metric; its share of the energy.
        energies: energies of the kept latent dimensions in the method's metric, descending; used by slicing.
        measured: relative output error of the layer's attention on the source's inputs, by lossy stage.
    """

    layer: int
    rank: int = 0
    rope_dim: int = 0
    rope_error: float | None = None
    latent_error: float | None = None
    latent_error_share: float | None = None
    energies: list[float] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "rank", "rotated", "RoPE, predicted", "latent, predicted"

    def cells(self) -> tuple:
        return self.rank or "kept", self.rope_dim, share(self.rope_error), share(self.latent_error_share)

    @classmethod
    def of(cls, layer: int, converted: ConvertedLayer, energies: Tensor, errors: dict[str, float]) -> LayerReport:
        return cls(
            layer,
            converted.truncated.rank,
            converted.truncated.rope_dim,
            converted.rope_error,
            converted.latent_error,
            converted.latent_error / max(float(converted.energy.sum()), 1e-300),
            energies.tolist(),
            errors,
        )


def mla_target(carrier: Carrier, method: str, layers: list[LayerReport]) -> dict:
    """Build the ``target`` of :class:`surgery.structures.base.Outcome`."""
    writer, rotated = carrier.writer, [layer.rope_dim for layer in layers if layer.rank]
    return {
        "to": "mla",
        "method": method,
        "model_type": "deepseek_v3" if carrier.stock else "surgery",
        "reasons": list(carrier.reasons),
        "kv_lora_rank": layers[0].rank if writer.spec.uniform else None,
        "kv_lora_ranks": list(writer.spec.ranks),
        "rope_dim": rotated[0] if len(set(rotated)) == 1 else None,
        "rope_dims": [layer.rope_dim for layer in layers],
        "inverse_frequencies": writer.spec.inv_freq[0].tolist() if writer.spec.uniform else None,
        "default_rope_theta": writer.theta if carrier.stock else None,
        "latent_norm": writer.norm.kind if carrier.stock else None,
        "residual_rescale": writer.rescale if carrier.stock else None,
    }
