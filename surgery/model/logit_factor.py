"""Scale and softcap of the logits, under the names that the families' configs use.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from typing import Any

CAPPED = ("gemma2", "gemma3_text")
"""Families whose classes apply `final_logit_softcapping`; others ignore it."""


def logit_factor(config: Any) -> float:
    """Return the factor of the logits, 1.0 for most families.

    Granite divides by `logits_scaling`, Cohere has `logit_scale`, MiniCPM3 has `dim_model_base` / `hidden_size`.
    """
    if getattr(config, "dim_model_base", None):
        return config.dim_model_base / config.hidden_size
    if getattr(config, "logits_scaling", None):
        return 1.0 / config.logits_scaling
    factor = getattr(config, "logit_scale", None)
    return 1.0 if factor is None else float(factor)


def logit_cap(config: Any) -> float | None:
    """Return the softcap c in the final `c tanh(logits / c)`; None for most families."""
    family = getattr(config, "base_model_type", config.model_type)
    return getattr(config, "final_logit_softcapping", None) if family in CAPPED else None
