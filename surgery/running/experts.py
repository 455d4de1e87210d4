"""Share of the experts of MoE models that a token activates."""

from __future__ import annotations

from typing import Any


def share_of_experts(config: Any) -> float:
    """Return the share of a layer's experts that a token activates."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / count if count and used else 1.0
