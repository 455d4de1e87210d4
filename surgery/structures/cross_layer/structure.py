"""``surgery convert --to crosslayer``: a cascade, whose layers also read the latents of earlier layers in their group.

These latents are in the cache already, and keys and values of neighboring layers are similar. A layer's packed row
holds the quantized residual of the prediction from the earlier layers' decoded latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.families import LATENT_FAMILIES
from surgery.running.source import Source
from surgery.structures.base import Candidate, TargetOption
from surgery.structures.cross_layer.settings import RATIO, CrossLayerSettings
from surgery.structures.low_rank.quantized import QuantizedRows


class Cascade(QuantizedRows):
    """Conversion to a cascade in packed rows."""

    name = "crosslayer"
    supports_multimodal = False
    usual_ratio = RATIO
    options = (TargetOption(), TargetOption(" --kv-ratio 0.0625", {"kv_ratio": 0.0625}, listed=False))

    def __init__(self, opened: Source, settings: CrossLayerSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.earlier = earlier_layers(opened.layers, settings.layers_per_group, self.kept)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the cascade as the candidate, for sources without MLA."""
        return [] if config["model_type"] in LATENT_FAMILIES else [Candidate({})]


def earlier_layers(layers: int, group_size: int, kept: frozenset[int]) -> tuple[int, ...]:
    """Count, for each layer, the earlier layers of its group; unchanged layers separate groups.

    Raises SurgeryError: no two converted layers are adjacent.
    """
    earlier: list[int] = []
    for layer in range(layers):
        adjacent = layer > 0 and not kept & {layer - 1, layer}
        earlier.append((earlier[-1] + 1) % group_size if adjacent else 0)
    if not any(earlier):
        raise SurgeryError("no converted layers are adjacent: convert --to lowrank --bits auto instead")
    return tuple(earlier)
