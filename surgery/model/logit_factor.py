"""Factor of the output projection's results, in the words of each family's config.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from typing import Any

CAPPED = ("gemma2", "gemma3_text")
"""Families whose classes read `final_logit_softcapping`; others leave it unread."""


def logit_factor(config: Any) -> float:
    """Return the factor of the logits: 1.0 for most; Granite divides by `logits_scaling`, Cohere has a `logit_scale`.

    MiniCPM3 multiplies by `dim_model_base` over its hidden size.
    """
    if getattr(config, "dim_model_base", None):
        return config.dim_model_base / config.hidden_size
    if getattr(config, "logits_scaling", None):
        return 1.0 / config.logits_scaling
    factor = getattr(config, "logit_scale", None)
    return 1.0 if factor is None else float(factor)


def logit_cap(config: Any) -> float | None:
    """c of `c tanh(logits / c)`, which they pass last; None for most."""
    family = getattr(config, "base_model_type", config.model_type)
    return getattr(config, "final_logit_softcapping", None) if family in CAPPED else None


__all__ = ["CAPPED", "logit_cap", "logit_factor"]
