"""Groups of layers, of which each reads the latents of those before it."""

from __future__ import annotations


def group_of(layer: int, earlier: tuple[int, ...]) -> tuple[int, int]:
    """Return the first layer of a layer's group, and the one after its last.

    Args:
        earlier: layers of its group before each one.
    """
    start = stop = layer - earlier[layer]
    while stop < len(earlier) and stop - earlier[stop] == start:
        stop += 1
    return start, stop
