"""Calibration sweeps over a streamed model: forward to the loss, backward for its gradients.

The forward sweep stores the inputs of each layer (a file per layer, in a temporary folder). The backward sweep reloads
the layers from last to first, recomputes each with gradients and yields its statistics. Memory holds one layer and the
activations at one layer boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics, MomentAccumulator
from surgery.checkpoint import TensorSpec
from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.safetensors_format import encode_header, read_header
from surgery.checkpoint.snapshots import Snapshots
from surgery.checkpoint.tensors import as_bytes
from surgery.common.layer_files import LayerFiles
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import CapturedAttention
from surgery.running.activations import give_back, map_file
from surgery.running.layer_stream import LayerStream
from surgery.running.overflow import overflow
from surgery.running.source import Source

PARTS = 8
"""Maximum number of parts of the text whose sums are added up separately. It decides how sums round, so statistics of
other versions differ in the last bits if it changes."""


class BoundaryStore(LayerFiles):
    """Store of hidden states at layer boundaries, one file each: tokens x hidden size x layers elements in total.

    ``filled``: whether all boundaries are stored.
    """

    def __init__(self, parent: Path | None = None):
        super().__init__("boundaries", parent)
        self._sweep: Callable[[], object] | None = None
        self.filled = False

    def fill_on_load(self, sweep: Callable[[], object]) -> None:
        """Run ``sweep``, which saves all boundaries here, on the first load."""
        self._sweep = sweep

    def save(self, index: int, hidden: Tensor) -> None:
        """Save the inputs [N, T, D] of a layer. Raises SurgeryError: the disk is full."""
        path = self._path(index, ".safetensors")
        header, _ = encode_header({"hidden": TensorSpec(hidden.dtype, tuple(hidden.shape))}, {})
        with disk_errors(path), open(path, "wb") as file:
            file.write(header)
            for sequence in hidden:
                file.write(as_bytes(sequence.cpu().contiguous()).numpy())

    def load(self, index: int) -> Tensor:
        """Return the inputs of a layer [N, T, D], mapped from their file and read-only."""
        if self._sweep:
            sweep, self._sweep = self._sweep, None
            sweep()
        path = self._path(index, ".safetensors")
        info, offset = read_header(path.parent, path.name)["hidden"]
        return map_file(path, offset, info.shape, info.dtype)

    def forget(self, index: int) -> None:
        """Delete the file of a layer, if any; tensors mapped from it stay valid."""
        self._path(index, ".safetensors").unlink(missing_ok=True)

    def embed(self, stream: LayerStream, tokens: Tensor, batch_size: int) -> Tensor:
        """Embed tokens [N, T] in batches to the inputs of the first layer [N, T, D]."""
        hidden = torch.empty((*tokens.shape, stream.config.hidden_size), dtype=stream.dtype, device=stream.device)
        for rows in batches(len(tokens), batch_size):
            hidden[rows] = stream.embed(tokens[rows])
        return hidden


@dataclass
class SweptLayer:
    """Result of the backward sweep for one layer."""

    index: int
    anatomy: AttentionAnatomy
    statistics: list[LayerStatistics]  # one per number of excluded first tokens
    inputs: Tensor  # inputs of its attention (after the layer's norm), [N, T, D]


def forward_sweep(
    stream: LayerStream,
    tokens: Tensor,
    store: BoundaryStore,
    batch_size: int,
    progress: Callable[..., None],
    snapshots: Snapshots | None = None,
) -> Tensor:
    """Run tokens [N, T] through all layers, store the inputs of each, and return the last layer's output [N, T, D].

    ``snapshots`` have the state to resume from after an interruption: the last boundary that is stored.
    """
    snapshots = snapshots or Snapshots()
    if state := snapshots.last("forward"):
        begin = state["layer"]
        hidden = store.load(begin).clone()
        progress(begin)
    else:
        begin, hidden = 0, store.embed(stream, tokens, batch_size)
        store.save(0, hidden)
    for index in range(begin, stream.num_layers):
        with stream.layer(index) as layer:
            stream.run_layer(layer, hidden, batch_size)
        progress()
        if index + 1 < stream.num_layers:
            store.save(index + 1, hidden)
            snapshots.take("forward", lambda index=index: {"layer": index + 1})
    store.filled = True
    return hidden


def backward_sweep(
    opened: Source,
    store: BoundaryStore,
    final: Tensor | None,
    batch_size: int,
    *,
    gradients: bool = True,
    seed: int = 0,
    snapshots: Snapshots | None = None,
    first_tokens: Sequence[int] = (0,),
) -> Iterator[SweptLayer]:
    """Yield the statistics of every layer with keys and values, from last to first.

    Args:
        final: the forward sweep's result [N, T, D], overwritten by gradients; None if a snapshot has the state.
        gradients: whether to compute gradients of the loss (labels sampled from the model with ``seed``).
        snapshots: state to resume from after an interruption; finished layers are not yielded again.
        first_tokens: numbers of first tokens per sequence to exclude; statistics are computed for each.
    """
    stream, snapshots = opened.stream, snapshots or Snapshots()
    if state := snapshots.last("backward"):
        upstream, end, store.filled = state["upstream"], state["layer"], True
        upstream = None if upstream is None else upstream.clone()
    else:
        upstream, end = _upstream(stream, final, batch_size, seed) if gradients else None, stream.num_layers
    stateful = opened.stateful
    for index in reversed(range(end)):
        if index in stateful:  # no keys and values: only propagate gradients
            if gradients:
                _pass_gradients(stream, index, store.load(index), upstream, batch_size)
        else:
            yield _swept(stream, index, opened.anatomy(index), store, upstream, batch_size, first_tokens)
        snapshots.take("backward", lambda index=index: {"layer": index, "upstream": upstream})


def _swept(
    stream: LayerStream,
    index: int,
    anatomy: AttentionAnatomy,
    store: BoundaryStore,
    upstream: Tensor | None,
    batch_size: int,
    first_tokens: Sequence[int],
) -> SweptLayer:
    """Recompute a layer and replace gradients at its output [N, T, D], if any, by those at its input, in place."""
    anatomy, hidden, gradients = anatomy.to(stream.device, stream.dtype), store.load(index), upstream is not None
    moments = [MomentAccumulator(anatomy, gradients=gradients, first=first) for first in first_tokens]
    inputs = torch.empty(hidden.shape, dtype=stream.dtype)
    with stream.layer(index) as layer:
        for part in batch_parts(len(hidden), batch_size):
            for rows in part:
                captured = CapturedAttention(anatomy, gradients=gradients)
                leaf = hidden[rows].to(stream.device, stream.dtype).requires_grad_(gradients)
                with torch.set_grad_enabled(gradients):
                    out = layer(leaf, captured)
                if gradients:
                    out.backward(upstream[rows].to(out))
                    upstream[rows] = leaf.grad.to(upstream)
                for each in moments:
                    each.add(captured.projection, captured.inputs)
                inputs[rows] = captured.inputs.to(inputs)
                give_back(hidden)
            for each in moments:
                each.end_part()
    statistics = [each.result() for each in moments]
    if not all(each.is_finite() for each in statistics):
        raise overflow(stream.reader, f"calibration statistics of layer {index}")
    return SweptLayer(index, anatomy, statistics, inputs)


def _pass_gradients(stream: LayerStream, index: int, hidden: Tensor, upstream: Tensor, batch_size: int) -> None:
    """Backpropagate gradients [N, T, D] from a layer's output to its input, in place."""
    with stream.layer(index) as layer:
        for rows in batches(len(hidden), batch_size):
            leaf = hidden[rows].to(stream.device, stream.dtype).requires_grad_()
            with torch.enable_grad():
                out = layer(leaf)
            out.backward(upstream[rows].to(out))
            upstream[rows] = leaf.grad.to(upstream)
            give_back(hidden)


def _upstream(stream: LayerStream, final: Tensor, batch_size: int, seed: int) -> Tensor:
    """Replace the last layer's output [N, T, D] by the loss gradient at it, in place; labels are sampled."""
    generator = torch.Generator().manual_seed(seed)
    for rows in batches(len(final), batch_size):
        final[rows] = stream.sampled_loss_gradient(final[rows], generator)
    return final


def batches(sequences: int, batch_size: int) -> list[slice]:
    """Divide sequences into batches."""
    return [slice(start, min(start + batch_size, sequences)) for start in range(0, sequences, batch_size)]


def batch_parts(sequences: int, batch_size: int) -> list[list[slice]]:
    """Divide sequences into batches, and these into up to `PARTS` parts."""
    whole = batches(sequences, batch_size)
    count = min(PARTS, len(whole))
    return [whole[begin:end] for begin, end in pairwise(len(whole) * part // count for part in range(count + 1))]
