"""The rows of an evaluation: checkpoints, and cheap baselines at the checkpoints' KV ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import LongTensor
from transformers import PreTrainedModel

from surgery.calibration.mixture import build_mixture, shares_of, without_chat
from surgery.calibration.sequences import SequenceRequest, build_calibration
from surgery.calibration.text import BUILTIN
from surgery.common.errors import SurgeryError
from surgery.eval.variants.engine_cache import CALIBRATED, FORMATS, engine_cache
from surgery.eval.variants.quantized_kv import quantize_kv
from surgery.eval.variants.sink_window import sink_window
from surgery.evaluation.models import Checkpoint
from surgery.model.quantization import BITS

SINKS = 4
"""Attention sinks of the window variant, as StreamingLLM (arXiv:2309.17453) recommends."""

CALIBRATION = SequenceRequest(tokens=4096, length=512, recall=0.0, held_out=0)
"""Text of engines' caches that are calibrated."""

RATIOS = (0.5, 0.25)
"""KV ratios of the variants where there is no smaller checkpoint to match."""


@dataclass(frozen=True)
class ModelRow:
    """One model to measure.

    Attributes:
        name: its name in the report.
        role: baseline, checkpoint or variant.
        checkpoint: whose weights.
        variant: kind and parameters of a cheap baseline made of that checkpoint; None for itself.
    """

    name: str
    role: str
    checkpoint: Checkpoint
    variant: dict[str, Any] | None = None

    def load(self, device: torch.device) -> PreTrainedModel:
        """The model, in the checkpoint's own dtype.

        Raises:
            SurgeryError: it cannot be loaded, or has no such form.
        """
        model = self.checkpoint.load(device)
        if self.variant is None:
            return model
        parameters = {name: value for name, value in self.variant.items() if name != "kind"}
        if parameters.get("format") in CALIBRATED:
            parameters["tokens"] = _calibration(self.checkpoint)
        return VARIANTS[self.variant["kind"]](model, **parameters)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the model, independent of its name."""
        return {
            "sha256": self.checkpoint.sha256,
            "config_sha256": self.checkpoint.config_sha256,
            "variant": self.variant,
        }


VARIANTS = {
    "engine-cache": engine_cache,
    "quantized-kv": quantize_kv,
    "sink-window": sink_window,
}


def _calibration(checkpoint: Checkpoint) -> LongTensor:
    """Sequences [N, T] of built-in text, of prose and code unless the model is one of code."""
    tokenizer = checkpoint.tokenizer()
    if (shares := shares_of(BUILTIN, tokenizer)) is None:
        return build_calibration(tokenizer, BUILTIN, CALIBRATION).tokens
    return build_mixture(tokenizer, without_chat(shares), lambda *_: [], CALIBRATION).tokens


def plan_variants(
    names: Sequence[str], baseline: Checkpoint, ratios: Sequence[float], context: int
) -> tuple[list[ModelRow], list[str]]:
    """Rows of cheap baselines, and notes on those that there are not.

    Quantized caches, and those of engines, have the bytes that they have. Windows are made to hold at most as many
    bytes at ``context`` as each of the ``ratios`` (of the checkpoints next to them) allows.
    """
    ratios = [ratio for ratio in dict.fromkeys(ratios) if 0 < ratio < 1] or list(RATIOS)
    variants: dict[str, dict[str, Any]] = {}
    notes = []
    for name in names:
        if name in FORMATS or name in CALIBRATED:
            variants[name] = {"kind": "engine-cache", "format": name}
        elif name in BITS:
            variants[f"{name} KV"] = {"kind": "quantized-kv", "format": name}
        elif name == "window":
            for ratio in ratios:
                tokens = int(ratio * context)
                if tokens <= 2 * SINKS:
                    notes.append(f"no window at a KV share of {ratio:.3g}: {tokens} of {context} tokens")
                    continue
                variants[f"window {tokens}"] = {"kind": "sink-window", "sinks": SINKS, "recent": tokens - SINKS}
    return [ModelRow(name, "variant", baseline, variant) for name, variant in variants.items()], notes


def check_names(rows: Sequence[ModelRow]) -> None:
    """Raises SurgeryError where two rows have one name."""
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise SurgeryError(f"two models are called {name}: name them, surgery eval one=CKPT other=CKPT")
