"""What the output projection's results are multiplied by, in the words of each family's config.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from typing import Any


def logit_factor(config: Any) -> float:
    """1.0 for most; Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / config.logits_scaling
    factor = getattr(config, "logit_scale", None)
    return 1.0 if factor is None else float(factor)
