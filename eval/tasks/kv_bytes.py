"""Task of every report: bytes of the live cache, its peak, and the share of attention that is computed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import GROWTH_STEPS, KVUse, measure_kv
from surgery.eval.kv_flow import UpdateWatch, measure_footprint, measure_peak
from surgery.eval.report.tables import CONTEXTS
from surgery.eval.session import Session
from surgery.running.kv_bytes import kv_bytes_of

CHUNK = 256
"""Tokens of a prompt at a time, for the peak of a chunked prefill."""


@dataclass(frozen=True)
class KVBytesTask:
    """Reads and decodes to a context of that many tokens and counts what the cache holds then and held at most.

    See `surgery.eval.kv_cache.measure_kv` and `surgery.eval.kv_flow`. Models that can tell these numbers beforehand, as
    this package's own, have them under ``predicted``; bytes at longer contexts are under ``by_context``.
    """

    context: int
    name: ClassVar[str] = "kv"
    native: ClassVar[bool] = True

    def settings(self) -> dict[str, Any]:
        return {"context": self.context, "chunk": CHUNK}

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        return session.processes.from_main(lambda: self._measure(model))

    def _measure(self, model: PreTrainedModel) -> dict[str, Any]:
        steps = min(GROWTH_STEPS, self.context - 1)
        prompt = self.context - steps
        watch = UpdateWatch()  # of the peak, as `measure_peak` has it, in the pass that counts
        with watch.updates():
            use = measure_kv(model, self.context)
        return {
            **asdict(use),
            "peak_bytes": watch.peak if watch.held == use.held_bytes else None,
            "chunk": CHUNK,
            "chunked_peak_bytes": measure_peak(model, prompt, steps, CHUNK),
            "footprint": measure_footprint(model, prompt, steps),
            "predicted": self._predicted(model, prompt, steps),
            "by_context": by_context(model, use),
        }

    def _predicted(self, model: PreTrainedModel, prompt: int, steps: int) -> dict[str, Any] | None:
        if not hasattr(model, "kv_peak_bytes"):
            return None
        try:
            return {
                "held_bytes": model.kv_cache_bytes(1, self.context),
                "peak_bytes": model.kv_peak_bytes(1, prompt, prompt, steps),
                "chunked_peak_bytes": model.kv_peak_bytes(1, prompt, CHUNK, steps),
                "footprint": model.kv_footprint(prompt, steps),
            }
        except ValueError:  # there are caches whose peak can only be measured
            return None


def by_context(model: PreTrainedModel, use: KVUse) -> dict[str, int] | None:
    """Bytes of one sequence at each of `CONTEXTS`, by formula; None where that does not give the bytes measured."""
    try:
        if (formula := getattr(model, "kv_bytes", None)) is None:
            formula = kv_bytes_of(model.config.to_dict(), getattr(torch, use.dtype))
        agrees = formula(use.context) == use.held_bytes
        return {str(tokens): formula(tokens) for tokens in CONTEXTS} if agrees else None
    except (SurgeryError, ValueError):
        return None
