"""Multimodal models whose language model is of a supported family.

The language model is read as a checkpoint of that family and written back. Other parts (vision tower, projector) stay
bit-identical.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from surgery.common.errors import SurgeryError

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""Prefixes of the language model's tensors, in transformers and in published checkpoints."""

INSIDE = "model."
"""Prefix of all tensors but the output head, in transformers."""

HEADS = ("lm_head.weight", "language_model.lm_head.weight")

HOLD_CUSTOM = ("gemma3", "llava", "llava_next", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
HOLD_CUSTOM += ("qwen3_vl_moe", "surgery_pictures")
"""Models whose language model may convert to the custom model class, by ``model_type``."""

MULTIMODAL = (*HOLD_CUSTOM, "llama4")


def text_names(names: Collection[str], where: str) -> dict[str, str]:
    """Map the language model's tensor names among ``names`` to those of its family.

    Raises SurgeryError: ``names`` has no language model.
    """
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in names), None)
    if prefix is None:
        raise SurgeryError(f"{where}: embed_tokens.weight of a language model is missing")
    # Names of other parts may begin with `model.` too.
    begins = tuple(prefix + part for part in ("embed_tokens.", "layers.", "norm."))
    inside = {name: f"model.{name.removeprefix(prefix)}" for name in names if name.startswith(begins)}
    return inside | {name: HEADS[0] for name in HEADS if name in names}


def put_back(whole: dict[str, Any], text: dict[str, Any], converted: dict[str, Any]) -> dict[str, Any]:
    """Return the multimodal config.json ``whole`` with the fields that differ between ``text`` and ``converted``."""
    changed = {name: value for name, value in converted.items() if text.get(name) != value}
    if not isinstance(whole.get("text_config"), dict):  # early checkpoints of Qwen2.5-VL have its fields on top
        return {**whole, **changed}
    return {**whole, "text_config": {**whole["text_config"], **changed}}
