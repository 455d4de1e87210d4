"""``surgery convert --to hybrid``: heads with full context next to streaming heads of sinks and recent tokens.

Needs no calibration. Heads are reordered so that full heads come first, and the model class caches only sinks and a
window for the others. The loss is measured on held-out text: the source runs side by side with and without attention
masks for the streaming heads. The written files are reloaded, run with their caches and compared with the masked run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from surgery.architectures.hybrid import REASON, moved_tensors
from surgery.architectures.own_class import MODEL_TYPE, own_config
from surgery.architectures.sliding_layers import CARRIERS
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.heads.pattern import HeadPattern
from surgery.heads.plan import HeadPlan
from surgery.model.hybrid_entry import HybridEntry
from surgery.reporting.report import SourceShape
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.skeleton import skeleton
from surgery.structures.base import Candidate, Forecast, Outcome, Structure, TargetOption, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.hybrid.streaming import Streaming, layer_report, measure_plan
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

    def forecast(self) -> Forecast:
        """Forecast the conversion at the context of the settings; the result does not depend on the text."""
        opened, config = self.opened, own_config(self.opened.reader.config, self._entries)
        kv_bytes = kv_bytes_of(config, opened.weight_dtype)(self._context) / self._context
        return Forecast(
            config=config,
            tensors=unchanged_tensors(opened.reader, opened.config),
            kv_bytes_per_token=kv_bytes,
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(cached=round(kv_bytes / opened.layers / opened.weight_dtype.itemsize)),
        )

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Return the source's tensor specs; only the order of the heads changes."""
        return unchanged_tensors(self.opened.reader, self.opened.config)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Measure the plan as masks on the source's attention, and write the heads in their new order."""
        opened, plan, pattern = self.opened, self._plan, self._pattern
        reader, dtype = opened.reader, opened.weight_dtype
        hidden, scores, errors = measure_plan(opened, plan, work.texts, self.settings, work.progress)
        for layer in work.layers():
            for name, tensor in self._moved(layer).items():
                writer.write(name, tensor)
        config = own_config(reader.config, self._entries)
        kv_bytes, whole = (kv_bytes_of(each, dtype)(self._context) for each in (config, reader.config))
        return Outcome(
            config=config,
            target={
                "to": "hybrid",
                "method": "streaming-llm" if pattern is None else pattern.method,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                **_facts(plan, pattern, kv_bytes / whole, self._context, self.settings),
            },
            layers=[layer_report(layer, plan, pattern, error) for layer, error in enumerate(errors)],
            scores=scores,
            simulated=hidden,
            own_class=True,
            shape=SourceShape.of_config(opened.config, dtype, whole / self._context),
            flow=partial(predicted_flow, skeleton(config, opened.stream.dtype)),
        )

    def _moved(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's tensors with reordered heads; empty for layers without streaming heads or with latents."""
        if not isinstance(self._entries[layer], HybridEntry):
            return {}
        return moved_tensors(self.opened.reader, layer, self._plan.order(layer))


def _facts(
    plan: HeadPlan, pattern: HeadPattern | None, kv_ratio: float, context: int, settings: HybridSettings
) -> dict:
    return {
        "sinks": plan.sinks,
        "recent": plan.recent,
        "heads": plan.full.numel(),
        "full_heads": int(plan.full.sum()),
        "compensated_heads": int(plan.compensated.sum()),
        "heads_multiple": settings.heads_multiple,
        "context": context,
        "kv_ratio_at_context": kv_ratio,
        "pattern": None if pattern is None else pattern.identity(),
    }
