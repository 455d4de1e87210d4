"""Groups of layers in which each layer reads the latents of the layers before it."""

from __future__ import annotations


def group_of(layer: int, earlier: tuple[int, ...]) -> tuple[int, int]:
    """Return the first layer of a layer's group and the one after its last; ``earlier`` counts predecessors."""
    start = stop = layer - earlier[layer]
    while stop < len(earlier) and stop - earlier[stop] == start:
        stop += 1
    return start, stop
