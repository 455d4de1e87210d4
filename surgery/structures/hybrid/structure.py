"""``surgery convert --to hybrid``: some heads keep their whole context, the others sinks and recent tokens.

No calibration: heads are moved so that full ones come first, and the model class keeps the rest of a window only.
What the streaming heads lose is measured by carrying the source, and the source with their attention masked, through
held-out text side by side; the written files are loaded again, run through their caches and compared with the latter.
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
    """Some heads keep their whole context, the others sinks and recent tokens."""

    supports_multimodal = True
    options = (
        TargetOption(" --streaming 1", {"streaming": 1}, caution="every head forgets, surgery heads tells which may"),
    )

    @classmethod
    def for_source(cls, config: Mapping[str, Any], settings: HybridSettings) -> type[Structure]:
        """Whole layers stream in a stock class."""
        if settings.granularity == "layer":
            return WholeLayers
        return cls

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return as many full heads as the budget holds, of the plan's pattern, and whole layers where a
        stock class has both kinds."""
        if config["model_type"] == MODEL_TYPE:
            return []
        layers = [Candidate({"granularity": "layer"})] if config["model_type"] in CARRIERS else []
        return [Candidate({}), *layers]

    def forecast(self) -> Forecast:
        """All of it, at the context that was asked for: nothing is left to the work but measuring."""
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
        """Every tensor stays; a layer's heads change places."""
        return unchanged_tensors(self.opened.reader, self.opened.config)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Measures the plan as masks on the source's attention, and writes heads in their new order."""
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
        """Tensors of a layer whose heads change places."""
        if not isinstance(self._entries[layer], HybridEntry):
            return {}
        return moved_tensors(self.opened.reader, layer, self._plan.order(layer))


def _facts(
    plan: HeadPlan, pattern: HeadPattern | None, kv_ratio: float, context: int, settings: HybridSettings
) -> dict:
    """Return the plan's entries of the report."""
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
