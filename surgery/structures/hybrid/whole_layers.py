"""``surgery convert --to hybrid --granularity layer``: layers with and without a sliding window, in a stock class.

Tensors stay unchanged. Engines that support sliding windows by layer need none of our code, but keep no sinks. The loss
increases more than with streaming heads of the same window.
"""

from __future__ import annotations

from typing import Any

from surgery.architectures.hybrid import StreamableModel, Unit
from surgery.architectures.sliding_layers import REASON, sliding_config
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.running.kv_bytes import kv_bytes_of
from surgery.structures.base import Forecast, Outcome, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.hybrid.streaming import Streaming, layer_report, measure_plan


class WholeLayers(Streaming):
    """Conversion to layers with a sliding window next to layers with full context."""

    def _with_units(self, model: StreamableModel) -> StreamableModel:
        heads = tuple(range(model.kv_heads))
        return StreamableModel(
            model.config,
            model.kv_heads,
            model.head_dim,
            ((Unit(heads, 2 * len(heads) * model.head_dim),),) * model.layers,
        )

    @property
    def _streams(self) -> list[bool]:
        return self._plan.streams.all(dim=1).tolist()

    @property
    def _config(self) -> dict[str, Any]:
        return sliding_config(self.opened.reader.config, self._streams, self._plan.recent)

    def forecast(self) -> Forecast:
        """Forecast the conversion at the context of the settings; the result does not depend on the text."""
        opened, config = self.opened, self._config
        kv_bytes = kv_bytes_of(config, opened.weight_dtype)(self._context) / self._context
        return Forecast(
            config=config,
            tensors=unchanged_tensors(opened.reader, opened.config),
            kv_bytes_per_token=kv_bytes,
            model_type=config["model_type"],
            reasons=[REASON.format(config["model_type"])],
            demand=Demand(cached=round(kv_bytes / opened.layers / opened.weight_dtype.itemsize)),
        )

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Return the source's tensor specs."""
        return unchanged_tensors(self.opened.reader, self.opened.config)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Measure the plan as masks on the source's attention; write no new tensors."""
        opened, plan, pattern, config = self.opened, self._plan, self._pattern, self._config
        hidden, scores, errors = measure_plan(opened, plan, work.texts, self.settings, work.progress)
        sizes = (config, opened.reader.config)
        kv_bytes, whole = (kv_bytes_of(each, opened.weight_dtype)(self._context) for each in sizes)
        return Outcome(
            config=config,
            target={
                "to": "hybrid",
                "method": "streaming-llm" if pattern is None else pattern.method,
                "model_type": config["model_type"],
                "reasons": [REASON.format(config["model_type"])],
                "sinks": 0,
                "recent": plan.recent,
                "heads": plan.full.numel(),
                "full_heads": int(plan.full.sum()),
                "compensated_heads": 0,
                "context": self._context,
                "kv_ratio_at_context": kv_bytes / whole,
                "pattern": None if pattern is None else pattern.identity(),
            },
            layers=[layer_report(layer, plan, pattern, error) for layer, error in enumerate(errors)],
            scores=scores,
            simulated=hidden,
        )
