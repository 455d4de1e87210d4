"""``surgery convert --to hybrid --granularity layer``: layers with a sliding window beside others, in stock.

No tensor changes. Engines that know sliding windows by layer need no code of ours; they keep no sinks, which costs more
than streaming heads do at the same window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surgery.architectures.hybrid import StreamableModel, Unit
from surgery.architectures.sliding_layers import REASON, sliding_config
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.structures.base import Foreseen, Outcome, unchanged_tensors
from surgery.structures.estimates import Demand
from surgery.structures.hybrid.streaming import Streaming, layer_report, measure_plan
from surgery.structures.work import Work


class WholeLayers(Streaming):
    """A layer keeps its whole context, or a window of it."""

    def _made_of(self, model: StreamableModel) -> StreamableModel:
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

    def _held(self, streams: list[bool]) -> Callable[[int], float]:
        """Bytes of one sequence by its tokens: a window keeps what the next token sees besides itself."""
        kept, width = self._plan.recent - 1, self.opened.first.kv_width * self.opened.weight_dtype.itemsize
        return lambda tokens: sum(width * (min(tokens, kept) if each else tokens) for each in streams)

    def foresee(self) -> Foreseen:
        """All of it, at the context that was asked for: nothing is left to the work but measuring."""
        opened, config = self.opened, self._config
        held = self._held(self._streams)(self._context) / self._context
        return Foreseen(
            config=config,
            tensors=unchanged_tensors(opened.reader, opened.config),
            kv_bytes_per_token=held,
            model_type=config["model_type"],
            reasons=[REASON.format(config["model_type"])],
            demand=Demand(cached=round(held / opened.layers / opened.weight_dtype.itemsize)),
        )

    def plan(self, work: Work) -> dict[str, TensorSpec]:
        """Every tensor stays."""
        return unchanged_tensors(self.opened.reader, self.opened.config)

    def convert_layers(self, work: Work, writer: CheckpointWriter) -> Outcome:
        """Measures the plan as masks on the source's attention; nothing new is written."""
        opened, plan, pattern, config = self.opened, self._plan, self._pattern, self._config
        hidden, scores, errors = measure_plan(opened, plan, work.texts, self.settings, work.progress)
        held = self._held(self._streams)
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
                "kv_ratio_at_context": held(self._context) / self._held([False] * opened.layers)(self._context),
                "pattern": None if pattern is None else pattern.identity(),
            },
            kv_bytes=held,
            layers=[layer_report(layer, plan, pattern, error) for layer, error in enumerate(errors)],
            scores=scores,
            simulated=hidden,
        )
