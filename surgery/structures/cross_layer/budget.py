"""Rank of the shared latent of a group of layers, from the budget."""

from __future__ import annotations

from surgery.common.errors import SurgeryError
from surgery.structures.cross_layer.settings import CrossLayerSettings


def shared_rank(full: int, layers: int, settings: CrossLayerSettings, rotary_elements: int = 0) -> int:
    """Compute the elements per token that a group of ``layers`` shares, in place of the ``full`` that they cache.

    Args:
        rotary_elements: elements of the rotated keys of MLA, which stay unchanged. The ratio (default 0.5 with them,
            0.25 without) includes them.

    Raises:
        SurgeryError: the rank is less than 1 or not less than ``full``.
    """
    ratio = (0.5 if rotary_elements else 0.25) if settings.kv_ratio is None else settings.kv_ratio
    rank = settings.rank * layers if settings.rank else int(ratio * (full + rotary_elements) + 1e-9) - rotary_elements
    rank -= rank % settings.rank_multiple
    if not 1 <= rank < full:
        stays = f" next to {rotary_elements} of rotary keys, which stay" if rotary_elements else ""
        raise SurgeryError(
            f"{rank} elements per token for {layers} layers (in multiples of {settings.rank_multiple}): must be fewer "
            f"than the source's {full}{stays}, and at least one multiple"
        )
    return rank
