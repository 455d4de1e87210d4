"""Rows of an evaluation: checkpoints, and cheap baselines at the checkpoints' KV ratios."""

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
"""Calibration text of the engines' cache formats that need calibration."""

RATIOS = (0.5, 0.25)
"""KV ratios of the variants if there is no checkpoint with a smaller cache to match."""


@dataclass(frozen=True)
class ModelRow:
    """Model to evaluate, by name; its role is "baseline", "checkpoint" or "variant".

    ``variant`` has kind and parameters of a cheap baseline; None for the unmodified checkpoint.
    """

    name: str
    role: str
    checkpoint: Checkpoint
    variant: dict[str, Any] | None = None

    def load(self, device: torch.device) -> PreTrainedModel:
        """Load the model in the checkpoint's dtype, with the variant's cache.

        Raises SurgeryError: the model cannot be loaded, or does not support the variant.
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


VARIANTS = {"engine-cache": engine_cache, "quantized-kv": quantize_kv, "sink-window": sink_window}


def _calibration(checkpoint: Checkpoint) -> LongTensor:
    """Build calibration sequences [N, T]: built-in code for code models, else a mixture of prose and code."""
    tokenizer = checkpoint.tokenizer()
    if (shares := shares_of(BUILTIN, tokenizer)) is None:
        return build_calibration(tokenizer, BUILTIN, CALIBRATION).tokens
    return build_mixture(tokenizer, without_chat(shares), lambda *_: [], CALIBRATION).tokens


def plan_variants(
    names: Sequence[str], baseline: Checkpoint, ratios: Sequence[float], context: int
) -> tuple[list[ModelRow], list[str]]:
    """Return the rows of cheap baselines, and notes on baselines that are left out.

    The bytes of quantized caches and engines' caches follow from the format. Windows are sized to hold at ``context``
    tokens at most each of ``ratios``, the KV ratios of the checkpoints, or `RATIOS` if none is below 1.
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
        else:
            raise SurgeryError(f"cheap baseline {name}: no cache is registered under this name", setting="variants")
    return [ModelRow(name, "variant", baseline, variant) for name, variant in variants.items()], notes


def check_names(rows: Sequence[ModelRow]) -> None:
    """Raise SurgeryError if two rows have the same name."""
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise SurgeryError(f"two models are named {name}: pass names, surgery eval one=CKPT other=CKPT")
