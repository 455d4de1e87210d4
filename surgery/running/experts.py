"""Expected expert coverage of MoE models."""

from __future__ import annotations

from typing import Any


def share_of_experts(config: Any, tokens: int = 1) -> float:
    """Compute the expected share of a layer's experts that tokens activate: 1 - (1 - k / n) ** tokens."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    used = getattr(config, "num_experts_per_tok", None)
    return 1.0 if not count or not used else 1.0 - (1.0 - used / count) ** tokens
