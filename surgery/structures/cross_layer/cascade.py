"""``surgery convert --to crosslayer --method cascade``: layers also read the latents of earlier layers in their group.

These latents are in the cache already, and keys and values of neighboring layers are similar.
"""

from __future__ import annotations

from dataclasses import fields

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.source import Source
from surgery.structures.context import ConversionContext
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.low_rank.quantized import QuantizedRows
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.low_rank.structure import LowRank


class Cascade(LowRank):
    """Low-rank conversion with latents that later layers of a group read, too."""

    name = "crosslayer"
    supports_multimodal = False

    def __init__(self, opened: Source, settings: CrossLayerSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.asked = _layer_settings(settings)
        self.earlier = _earlier_layers(opened, settings, self.kept)

    def gather(self, work: ConversionContext) -> None:
        if work.texts.calibration is None:
            raise SurgeryError("--to crosslayer requires calibration text: drop --calibration none")
        super().gather(work)


class QuantizedCascade(QuantizedRows):
    """Cascade in packed rows: quantized residuals of the prediction from earlier layers' decoded latents."""

    name = "crosslayer"
    supports_multimodal = False

    def __init__(self, opened: Source, settings: CrossLayerSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.earlier = _earlier_layers(opened, settings, self.kept)


def _layer_settings(settings: CrossLayerSettings) -> LowRankSettings:
    """Return the low-rank settings of the layers of a cascade."""
    names = {field.name for field in fields(LowRankSettings)}
    values = {name: value for name, value in settings.to_dict().items() if name in names}
    return LowRankSettings(**{**values, "method": "fisher"})


def _earlier_layers(opened: Source, settings: CrossLayerSettings, kept_layers: frozenset[int]) -> tuple[int, ...]:
    """Count, for each layer, the earlier layers of its group. A group has no unchanged layers and a single window.

    Raises SurgeryError: no layers with a KV cache are adjacent, because of layers with a recurrent state between them.
    """
    earlier, windows = [], opened.windows
    for layer, window in enumerate(windows):
        same = layer > 0 and window == windows[layer - 1] and not kept_layers & {layer - 1, layer}
        count = earlier[-1] + 1 if same and earlier[-1] + 1 < settings.layers_per_group else 0
        earlier.append(count)
    if opened.stateful and not any(earlier):
        raise SurgeryError(
            "method cascade: no layers with a KV cache are adjacent, as layers with a recurrent state are between "
            "them: convert --to lowrank instead",
            setting="method",
        )
    return tuple(earlier)
