"""``surgery convert --to hybrid --granularity layer``: layers with and without a sliding window, in a stock class.

Tensors stay unchanged. Engines that support sliding windows by layer need none of our code, but keep no sinks. The loss
increases more than with streaming heads of the same window.
"""

from __future__ import annotations

from typing import Any

from surgery.architectures.hybrid import StreamableModel, Unit
from surgery.architectures.sliding_layers import REASON, sliding_config
from surgery.structures.hybrid.streaming import Streaming


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
    def _config(self) -> dict[str, Any]:
        streams = self._plan.streams.all(dim=1).tolist()
        return sliding_config(self.opened.reader.config, streams, self._plan.recent)

    @property
    def _reason(self) -> str:
        return REASON.format(self._config["model_type"])
