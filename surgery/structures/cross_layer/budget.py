"""Sizes of the shared store of a group of layers, from the budget."""

from __future__ import annotations

from surgery.common.errors import SurgeryError
from surgery.structures.cross_layer.settings import CrossLayerSettings


def shared_rank(full: int, layers: int, settings: CrossLayerSettings, beside: int = 0) -> int:
    """Numbers that a group of ``layers`` keeps of a token, of the ``full`` that they cache.

    Args:
        beside: rotated keys of MLA, which stay; the ratio, a half by default, is of them too.

    Raises:
        SurgeryError: they are none, or all.
    """
    ratio = (0.5 if beside else 0.25) if settings.kv_ratio is None else settings.kv_ratio
    rank = settings.rank * layers if settings.rank else int(ratio * (full + beside) + 1e-9) - beside
    rank -= rank % settings.rank_multiple
    if not 1 <= rank < full:
        stays = f" beside {beside} of rotated keys, which stay" if beside else ""
        raise SurgeryError(
            f"{rank} numbers per token for {layers} layers (in multiples of {settings.rank_multiple}): choose fewer "
            f"than the source's {full}{stays}, and one multiple at least"
        )
    return rank
