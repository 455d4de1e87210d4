"""``surgery convert --to hybrid``: heads with full context next to streaming heads of sinks and recent tokens.

Needs no calibration. Heads are reordered so that full heads come first, and the model class caches only sinks and a
window for the others. The loss is measured on held-out text: the source runs side by side with and without attention
masks for the streaming heads. The written files are reloaded, run with their caches and compared with the masked run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from surgery.architectures.custom_class import MODEL_TYPE, own_config
from surgery.architectures.hybrid import REASON, moved_tensors
from surgery.architectures.sliding_layers import CARRIERS
from surgery.checkpoint import CheckpointWriter
from surgery.model.hybrid_entry import HybridEntry
from surgery.reporting.report import SourceShape
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.skeleton import skeleton
from surgery.structures.base import Candidate, Outcome, Structure, TargetOption
from surgery.structures.context import ConversionContext
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.hybrid.streaming import Streaming
from surgery.structures.hybrid.whole_layers import WholeLayers
from surgery.verification.flow import predicted_flow


class Hybrid(Streaming):
    """Conversion to heads with full context next to streaming heads."""

    supports_multimodal = True
    options = (
        TargetOption(
            " --streaming 1",
            {"streaming": 1},
            caution="all heads stream; surgery heads finds the heads that tolerate it",
        ),
    )

    @classmethod
    def for_source(cls, config: Mapping[str, Any], settings: HybridSettings) -> type[Structure]:
        """Return the class for the granularity; whole layers stream in a stock class."""
        if settings.granularity == "layer":
            return WholeLayers
        return cls

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the candidates: streaming heads, and whole layers if a stock class mixes windowed and full layers."""
        if config["model_type"] == MODEL_TYPE:
            return []
        layers = [Candidate({"granularity": "layer"})] if config["model_type"] in CARRIERS else []
        return [Candidate({}), *layers]

    @property
    def _config(self) -> dict[str, Any]:
        return own_config(self.opened.reader.config, self._entries)

    @property
    def _reason(self) -> str:
        return REASON

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Measure the plan as masks on the source's attention, and write the heads in their new order."""
        outcome, opened, dtype = super().convert_layers(work, writer), self.opened, self.opened.weight_dtype
        for layer in work.layers():
            for name, tensor in self._moved(layer).items():
                writer.write(name, tensor)
        kv_bytes = kv_bytes_of(opened.reader.config, dtype)(self._context) / self._context
        return replace(
            outcome,
            custom_class=True,
            shape=SourceShape.of_config(opened.config, dtype, kv_bytes),
            flow=partial(predicted_flow, skeleton(outcome.config, opened.stream.dtype)),
        )

    def _moved(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's tensors with reordered heads; empty for layers without streaming heads or with latents."""
        if not isinstance(self._entries[layer], HybridEntry):
            return {}
        return moved_tensors(self.opened.reader, layer, self._plan.order(layer))
