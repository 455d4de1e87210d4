"""KV memory task, part of every report: bytes of the live cache, peak bytes and KV footprint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import KVUse, measure_kv
from surgery.eval.kv_flow import UpdateWatch, measure_footprint, measure_peak
from surgery.eval.report.tables import CONTEXTS
from surgery.eval.session import Session
from surgery.running.kv_bytes import kv_bytes_of

CHUNK = 256
"""Prompt tokens per forward pass in the measurement of the peak with chunked prefill."""
STEPS = 1
"""Tokens decoded after the prompt in the measurements of that peak and of the footprint."""


@dataclass(frozen=True)
class KVBytesTask:
    """Measurement of the cache bytes after `context` tokens, the peak bytes on the way there and the KV footprint.

    See `surgery.eval.kv_cache.measure_kv` and `surgery.eval.kv_flow`; ``by_context`` has the bytes at longer contexts.
    """

    context: int
    name: ClassVar[str] = "kv"
    native: ClassVar[bool] = True

    def settings(self) -> dict[str, Any]:
        return {"context": self.context, "chunk": CHUNK, "steps": STEPS}

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        return session.processes.from_main(lambda: self._measure(model))

    def _measure(self, model: PreTrainedModel) -> dict[str, Any]:
        prompt = self.context - STEPS
        watch = UpdateWatch()  # records the peak, as in `measure_peak`, during the same pass
        with watch.updates():
            use = measure_kv(model, self.context)
        return {
            **asdict(use),
            "peak_bytes": watch.peak if watch.held == use.held_bytes else None,
            "chunk": CHUNK,
            "chunked_peak_bytes": measure_peak(model, prompt, STEPS, CHUNK),
            "footprint": measure_footprint(model, prompt, STEPS),
            "by_context": by_context(model, use),
        }


def by_context(model: PreTrainedModel, use: KVUse) -> dict[str, int] | None:
    """Compute the bytes of one sequence at each of `CONTEXTS`; None if the formula disagrees with the measurement."""
    try:
        if (formula := getattr(model, "kv_bytes", None)) is None:
            formula = kv_bytes_of(model.config.to_dict(), getattr(torch, use.dtype))
        agrees = formula(use.context) == use.held_bytes
        return {str(tokens): formula(tokens) for tokens in CONTEXTS} if agrees else None
    except (SurgeryError, ValueError):
        return None
