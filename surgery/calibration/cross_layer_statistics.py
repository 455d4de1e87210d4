"""What the layers of a group have to do with each other: the joint second moment of their keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.calibration.sweep import BoundaryStore
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.running.activations import give_back
from surgery.running.source import Source


@torch.no_grad()
def joint_moment(opened: Source, store: BoundaryStore, start: int, stop: int, batch_size: int) -> Tensor:
    """``E[z zᵀ]`` of the stacked ``z_i = [k ; v]`` of layers ``start`` to ``stop`` - 1, [W·n, W·n] in float64.

    Keys are without biases and before their norm; of MLA z_i are latents behind theirs. Products of a batch are taken
    in the stream's dtype and summed in float64.

    Args:
        store: what entered each layer in the forward sweep over calibration text.
    """
    stream = opened.stream
    if isinstance(opened.first, LatentAnatomy):
        return _latent_moment(opened, store, start, stop, batch_size)
    rows, inputs, shifts, normed = [], [], [], stream.input_norm(start) is not None
    for index in range(start, stop):
        anatomy = opened.anatomy(index).to(stream.device, stream.dtype)
        part, shift = torch.cat([anatomy.k.flatten(0, 1), anatomy.v.flatten(0, 1)]), None
        if normed:
            # The norm before the attention is the source's, and its weight can act on the rows instead.
            weight, bias = stream.input_norm(index)
            shift = None if bias is None else part @ bias.to(part)
            part = part * weight.to(part)
        rows.append(part)
        shifts.append(shift)
        inputs.append(store.load(index))
    width = sum(len(part) for part in rows)
    moment = torch.zeros(width, width, dtype=torch.float64)
    tokens = inputs[0].shape[:2].numel()
    for first in range(0, len(inputs[0]), batch_size):
        stacked = []
        for hidden, part, shift in zip(inputs, rows, shifts, strict=True):
            x = hidden[first : first + batch_size].flatten(0, 1).to(stream.device, stream.dtype)
            z = (stream.normalise(x) if normed else x) @ part.mT
            stacked.append(z if shift is None else z + shift)
        z = torch.cat(stacked, dim=-1)
        moment += (z.mT @ z).double().cpu()
        give_back(*inputs)
    return moment / tokens


def _latent_moment(opened: Source, store: BoundaryStore, start: int, stop: int, batch_size: int) -> Tensor:
    stream = opened.stream
    layers = [opened.anatomy(index).to(torch.float64).to(stream.device, stream.dtype) for index in range(start, stop)]
    norms = [[part.to(stream.device, stream.dtype) for part in stream.input_norm(i)[:1]] for i in range(start, stop)]
    inputs = [store.load(index) for index in range(start, stop)]
    width = sum(layer.rank for layer in layers)
    moment = torch.zeros(width, width, dtype=torch.float64)
    for batches in zip(*(hidden.split(batch_size) for hidden in inputs), strict=True):
        latents = []
        for hidden, layer, norm in zip(batches, layers, norms, strict=True):
            latent = layer.latent(stream.normalise(hidden.flatten(0, 1).to(stream.device, stream.dtype), *norm))
            latents.append(latent * layer.gain(latent))
        z = torch.cat(latents, dim=-1)
        moment += (z.mT @ z).double().cpu()
        give_back(*inputs)
    return moment / inputs[0].shape[:2].numel()
