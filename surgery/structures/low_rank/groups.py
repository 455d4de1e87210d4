"""Groups of layers in which each layer reads the latents of the layers before it."""

from __future__ import annotations


def group_of(layer: int, earlier: tuple[int, ...]) -> tuple[int, int]:
    """Return the span of a layer's group: its first layer, and the layer after its last.

    Args:
        earlier: for each layer, the number of earlier layers in its group.
    """
    start = stop = layer - earlier[layer]
    while stop < len(earlier) and stop - earlier[stop] == start:
        stop += 1
    return start, stop
