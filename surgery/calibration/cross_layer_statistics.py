"""Joint second moment of the keys and values of a group of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surgery.calibration.sweep import BoundaryStore
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.running.activations import give_back
from surgery.running.moment_precision import MomentPrecision
from surgery.running.source import Source


@torch.no_grad()
def joint_moment(opened: Source, store: BoundaryStore, start: int, stop: int, batch_size: int) -> Tensor:
    """Compute ``E[z zᵀ]`` of the stacked ``z_i = [k ; v]`` of layers ``start`` to ``stop`` - 1, [W·n, W·n] in float64.

    Keys are without biases and before their norm. For MLA, z_i are latents after their norm. ``store`` has the inputs
    of each layer. For dtypes and devices see :mod:`surgery.running.moment_precision`.
    """
    stream = opened.stream
    if isinstance(opened.first, LatentAnatomy):
        return _latent_moment(opened, store, start, stop, batch_size)
    rows, inputs, shifts, normed = [], [], [], stream.input_norm(start) is not None
    for index in range(start, stop):
        anatomy = opened.anatomy(index).to(stream.device, stream.dtype)
        part, shift = torch.cat([anatomy.k.flatten(0, 1), anatomy.v.flatten(0, 1)]), None
        if normed:
            # The weight of the norm before the attention is folded into the rows.
            weight, bias = stream.input_norm(index)
            shift = None if bias is None else part @ bias.to(part)
            part = part * weight.to(part)
        rows.append(part)
        shifts.append(shift)
        inputs.append(store.load(index))

    def cached(member: int, hidden: Tensor) -> Tensor:
        x, shift = hidden.to(stream.device, stream.dtype), shifts[member]
        z = (stream.normalize(x) if normed else x) @ rows[member].mT
        return z if shift is None else z + shift

    return moment_of(inputs, batch_size, cached)


def moment_of(inputs: Sequence[Tensor], batch_size: int, cached: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Compute ``E[z zᵀ]`` of the concatenated cached elements of layers with inputs [N, T, D], in float64.

    ``cached`` computes from a layer's index in the group and its inputs [tokens, D] the elements [tokens, n].
    """
    moment, precision = 0, None
    for batches in zip(*(hidden.split(batch_size) for hidden in inputs), strict=True):
        z = torch.cat([cached(member, hidden.flatten(0, 1)) for member, hidden in enumerate(batches)], dim=-1)
        precision = precision or MomentPrecision.of(z.device, 2 * 8 * z.shape[-1] ** 2)
        moment += precision.gram(z)
        give_back(*inputs)
    return moment.cpu() / inputs[0].shape[:2].numel()


def _latent_moment(opened: Source, store: BoundaryStore, start: int, stop: int, batch_size: int) -> Tensor:
    stream = opened.stream
    layers = [opened.anatomy(index).to(torch.float64).to(stream.device, stream.dtype) for index in range(start, stop)]
    norms = [[part.to(stream.device, stream.dtype) for part in stream.input_norm(i)[:1]] for i in range(start, stop)]
    inputs = [store.load(index) for index in range(start, stop)]

    def cached(member: int, hidden: Tensor) -> Tensor:
        layer, norm = layers[member], norms[member]
        latent = layer.latent(stream.normalize(hidden.to(stream.device, stream.dtype), *norm))
        return latent * layer.gain(latent)

    return moment_of(inputs, batch_size, cached)
