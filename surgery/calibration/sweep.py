"""The two sweeps of calibration over a streamed model: forward to the loss, backward for its gradients.

The forward sweep stores what enters each layer (one file a layer, in a temporary folder); the backward sweep reloads
one layer after the other from last to first, recomputes it with gradients and hands its statistics out. Memory holds
one layer and the activations at one boundary, or a limit of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics, MomentAccumulator
from surgery.checkpoint import TensorSpec
from surgery.checkpoint.disk import disk_errors, parse_size
from surgery.checkpoint.safetensors_format import encode_header, read_header
from surgery.checkpoint.snapshots import Snapshots
from surgery.checkpoint.tensors import as_bytes
from surgery.common.layer_files import LayerFiles
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import CapturedAttention
from surgery.running.activations import ActivationMemory, give_back, map_file
from surgery.running.layer_stream import LayerStream


class BoundaryStore(LayerFiles):
    """Hidden states at layer boundaries, one file each; they grow to tokens x hidden size x layers numbers.

    Args:
        limit: of the activations that are in memory beside the files, such as ``4GiB``; None for none.

    Attributes:
        filled: whether all are there.
        memory: for the activations at the boundary that is at work.
    """

    def __init__(self, parent: Path | None = None, limit: str | None = None):
        super().__init__("boundaries", parent)
        self.memory = ActivationMemory(None if limit is None else parse_size(limit), self.folder)
        self._sweep: Callable[[], object] | None = None
        self.filled = False

    def fill_when_asked(self, sweep: Callable[[], object]) -> None:
        """Has ``sweep``, which saves all boundaries here, run when the first is loaded, if ever one is."""
        self._sweep = sweep

    def save(self, index: int, hidden: Tensor) -> None:
        """Raises SurgeryError where the disk is full."""
        path = self._path(index, ".safetensors")
        header, _ = encode_header({"hidden": TensorSpec(hidden.dtype, tuple(hidden.shape))}, {})
        with disk_errors(path), open(path, "wb") as file:
            file.write(header)
            for sequence in hidden:
                file.write(as_bytes(sequence.cpu().contiguous()).numpy())
                give_back(hidden)

    def load(self, index: int) -> Tensor:
        """What entered a layer [N, T, D], mapped from its file: to be read, not to be changed."""
        if self._sweep:
            sweep, self._sweep = self._sweep, None
            sweep()
        path = self._path(index, ".safetensors")
        info, offset = read_header(path.parent, path.name)["hidden"]
        return map_file(path, offset, info.shape, info.dtype)

    def embed(self, stream: LayerStream, tokens: Tensor, batch_size: int) -> Tensor:
        """Token embeddings of [N, T], for a sweep to go on with: [N, T, D]."""
        shape = (*tokens.shape, stream.config.hidden_size)
        hidden = self.memory.empty(shape, stream.dtype, stream.device)
        for rows in torch.arange(len(tokens)).split(batch_size):
            hidden[rows[0] : rows[-1] + 1] = stream.embed(tokens[rows])
            give_back(hidden)
        return hidden


@dataclass
class SweptLayer:
    """One layer as the backward sweep passes it."""

    index: int
    anatomy: AttentionAnatomy
    statistics: LayerStatistics
    inputs: Tensor  # what entered its attention (after the layer's norm), [N, T, D]


def forward_sweep(
    stream: LayerStream,
    tokens: Tensor,
    store: BoundaryStore,
    batch_size: int,
    progress: Callable[..., None],
    snapshots: Snapshots | None = None,
) -> Tensor:
    """Runs tokens [N, T] through all layers, storing what enters each; returns the last layer's output.

    Args:
        snapshots: what a sweep that was killed goes on from: the last boundary that is surely stored.
    """
    snapshots = snapshots or Snapshots()
    if state := snapshots.last("forward"):
        begin = state["layer"]
        hidden = store.memory.copy(store.load(begin))
        progress(begin)
    else:
        begin, hidden = 0, store.embed(stream, tokens, batch_size)
        store.save(0, hidden)
    for index in range(begin, stream.num_layers):
        with stream.layer(index) as layer:
            hidden = stream.run_layer(layer, hidden, batch_size)
        progress()
        if index + 1 < stream.num_layers:
            store.save(index + 1, hidden)
            snapshots.take("forward", lambda index=index: {"layer": index + 1})
    store.filled = True
    return hidden


def backward_sweep(
    stream: LayerStream,
    anatomy_of: Callable[[int], AttentionAnatomy],
    store: BoundaryStore,
    final: Tensor | None,
    batch_size: int,
    *,
    gradients: bool = True,
    seed: int = 0,
    snapshots: Snapshots | None = None,
    stateful: Collection[int] = (),
) -> Iterator[SweptLayer]:
    """Yields every layer's statistics, from last to first.

    Args:
        anatomy_of: the anatomy of a layer, in any dtype.
        final: the forward sweep's result [N, T, D], which gradients take the place of; None where a snapshot says how
            to go on.
        gradients: take gradients of the loss (labels drawn from the model itself, ``seed``); without, the sweep
            recomputes activations only.
        snapshots: what a sweep that was killed goes on from; layers that were dealt with are not yielded again.
        stateful: layers without keys and values, which gradients only pass.
    """
    snapshots = snapshots or Snapshots()
    if state := snapshots.last("backward"):
        upstream, end, store.filled = state["upstream"], state["layer"], True
        upstream = None if upstream is None else store.memory.copy(upstream)
    else:
        upstream, end = _upstream(stream, final, batch_size, seed) if gradients else None, stream.num_layers
    for index in reversed(range(end)):
        if index in stateful:
            if gradients:
                _pass_gradients(stream, index, store.load(index), upstream, batch_size)
            snapshots.take("backward", lambda index=index: {"layer": index, "upstream": upstream})
            continue
        anatomy = anatomy_of(index).to(stream.device, stream.dtype)
        hidden = store.load(index)
        moments = MomentAccumulator(anatomy, gradients=gradients, hold=store.memory.hold)
        inputs = store.memory.empty(hidden.shape, stream.dtype)
        with stream.layer(index) as layer:
            for start in range(0, len(hidden), batch_size):
                rows = slice(start, start + batch_size)
                captured = CapturedAttention(anatomy, gradients=gradients)
                leaf = hidden[rows].to(stream.device, stream.dtype).requires_grad_(gradients)
                with torch.set_grad_enabled(gradients):
                    out = layer(leaf, captured)
                if gradients:
                    out.backward(upstream[rows].to(out))
                    upstream[rows] = leaf.grad.to(upstream)
                moments.add(captured.projection, captured.outputs if gradients else None, captured.inputs)
                inputs[rows] = captured.inputs.to(inputs)
                give_back(hidden, inputs, *([upstream] if gradients else []))
        statistics, moments = moments.result(), None
        yield SweptLayer(index, anatomy, statistics, inputs)
        hidden = inputs = None  # before those of the next layer are there
        snapshots.take("backward", lambda index=index: {"layer": index, "upstream": upstream})


def _pass_gradients(stream: LayerStream, index: int, hidden: Tensor, upstream: Tensor, batch_size: int) -> None:
    """Carries gradients [N, T, D] from what a layer puts out to what enters it, in place."""
    with stream.layer(index) as layer:
        for start in range(0, len(hidden), batch_size):
            rows = slice(start, start + batch_size)
            leaf = hidden[rows].to(stream.device, stream.dtype).requires_grad_()
            with torch.enable_grad():
                out = layer(leaf)
            out.backward(upstream[rows].to(out))
            upstream[rows] = leaf.grad.to(upstream)
            give_back(hidden, upstream)


def _upstream(stream: LayerStream, final: Tensor, batch_size: int, seed: int) -> Tensor:
    """The gradient of the loss at what the last layer puts out [N, T, D], in its place.

    Labels are those that the model draws itself.
    """
    generator = torch.Generator().manual_seed(seed)
    for rows in final.split(batch_size):
        rows.copy_(stream.sampled_loss_gradient(rows, generator))
        give_back(final)
    return final
