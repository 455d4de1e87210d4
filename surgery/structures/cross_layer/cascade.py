"""``surgery convert --to crosslayer --method cascade``: layers read the latents of their group's earlier layers too.

Those are in the cache already, and keys and values of neighboring layers are much alike.
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
    """Low rank whose latents are read across layers."""

    name = "crosslayer"
    supports_multimodal = False

    def __init__(self, opened: Source, settings: CrossLayerSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.asked = _of_one_layer(settings)
        self.earlier = _earlier_layers(opened, settings, self.kept)

    def gather(self, work: ConversionContext) -> None:
        """Moments and the loss gradient's, of text."""
        if work.texts.calibration is None:
            raise SurgeryError(
                "--to crosslayer: what layers have in common shows in text only: drop --calibration none"
            )
        super().gather(work)


class QuantizedCascade(QuantizedRows):
    """Rows of what the decoded latents of earlier layers do not tell."""

    name = "crosslayer"
    supports_multimodal = False

    def __init__(self, opened: Source, settings: CrossLayerSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.earlier = _earlier_layers(opened, settings, self.kept)


def _of_one_layer(settings: CrossLayerSettings) -> LowRankSettings:
    """Return the settings of every single layer of a cascade."""
    names = {field.name for field in fields(LowRankSettings)}
    values = {name: value for name, value in settings.to_dict().items() if name in names}
    return LowRankSettings(**{**values, "method": "fisher"})


def _earlier_layers(opened: Source, settings: CrossLayerSettings, kept_layers: frozenset[int]) -> tuple[int, ...]:
    """Return how many layers of its group stand before each layer; groups span no unchanged layers or different
    windows.

    Raises:
        SurgeryError: layers that keep a state stand between all others.
    """
    earlier, windows = [], opened.windows
    for layer, window in enumerate(windows):
        same = layer > 0 and window == windows[layer - 1] and not kept_layers & {layer - 1, layer}
        place = earlier[-1] + 1 if same and earlier[-1] + 1 < settings.group_size else 0
        earlier.append(place)
    if opened.stateful and not any(earlier):
        raise SurgeryError(
            "method cascade: between layers with keys and values stand others that keep a state, so that none can "
            "read its neighbor's latents: convert --to lowrank instead",
            setting="method",
        )
    return tuple(earlier)
