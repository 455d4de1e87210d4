"""Calibration sweeps over a streamed model: forward to the loss, backward for its gradients.

The forward sweep stores the inputs of each layer (a file per layer, in a temporary folder). The backward sweep reloads
the layers from last to first, recomputes each with gradients and yields its statistics. Memory holds one layer and the
activations at one layer boundary, or a limited part of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery.calibration.parts import Parts
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
from surgery.running.layer_stream import LayerStream, sampling_numbers
from surgery.running.overflow import overflow
from surgery.running.processes import ALONE, Processes
from surgery.running.source import Source


class BoundaryStore(LayerFiles):
    """Store of hidden states at layer boundaries, one file each: tokens x hidden size x layers elements in total.

    ``limit`` is the maximum of activations in memory, such as ``4GiB``; ``filled``: whether all boundaries are stored.
    """

    def __init__(self, parent: Path | None = None, limit: str | None = None):
        super().__init__("boundaries", parent)
        self.memory = ActivationMemory(None if limit is None else parse_size(limit), self.folder)
        self._sweep: Callable[[], object] | None = None
        self.filled = False

    def fill_on_load(self, sweep: Callable[[], object]) -> None:
        """Run ``sweep``, which saves all boundaries here, on the first load."""
        self._sweep = sweep

    def save(self, index: int, hidden: Tensor, first: int = 0, of: int | None = None) -> None:
        """Save the inputs [n, T, D] of a layer from index ``first`` of all ``of``; other processes may write the rest.

        Raises SurgeryError: the disk is full.
        """
        path = self._path(index, ".safetensors")
        shape = (len(hidden) if of is None else of, *hidden.shape[1:])
        header, _ = encode_header({"hidden": TensorSpec(hidden.dtype, shape)}, {})
        with disk_errors(path), open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.write(header)
            file.seek(first * hidden[0].nbytes, os.SEEK_CUR)
            for sequence in hidden:
                file.write(as_bytes(sequence.cpu().contiguous()).numpy())
                give_back(hidden)

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

    def embed(self, stream: LayerStream, tokens: Tensor, batch_size: int, parts: Parts | None = None) -> Tensor:
        """Embed tokens [N, T], this process's sequences only, to the inputs of the first layer [n, T, D]."""
        parts = parts or Parts(len(tokens), batch_size)
        shape = (parts.num_local, tokens.shape[1], stream.config.hidden_size)
        hidden = self.memory.empty(shape, stream.dtype, stream.device)
        for part in parts.own:
            for rows, own in parts.batches(part):
                hidden[own] = stream.embed(tokens[rows])
                give_back(hidden)
        return hidden


@dataclass
class SweptLayer:
    """Result of the backward sweep for one layer."""

    index: int
    anatomy: AttentionAnatomy
    statistics: list[LayerStatistics]  # one per number of excluded first tokens
    inputs: Tensor  # inputs of its attention (after the layer's norm), [n, T, D], this process's sequences


def forward_sweep(
    stream: LayerStream,
    tokens: Tensor,
    store: BoundaryStore,
    batch_size: int,
    progress: Callable[..., None],
    snapshots: Snapshots | None = None,
    processes: Processes = ALONE,
) -> Tensor:
    """Run tokens [N, T] through all layers, store the inputs of each, and return the last layer's output [n, T, D].

    Args:
        snapshots: state to resume from after an interruption: the last boundary that is stored.
        processes: processes that share the sequences and the store; each returns the output of its n sequences.
    """
    snapshots, parts = snapshots or Snapshots(), Parts(len(tokens), batch_size, processes)

    def save(index: int, part: int) -> None:
        store.save(index, hidden[parts.own_rows(part)], parts.rows(part).start, len(tokens))

    def run(part: int) -> None:
        stream.run_layer(layer, hidden[parts.own_rows(part)], batch_size)
        if index + 1 < stream.num_layers:
            save(index + 1, part)

    if state := snapshots.last("forward"):
        begin = state["layer"]
        hidden = parts.pick(store.load(begin), store.memory)
        progress(begin)
    else:
        begin, hidden = 0, store.embed(stream, tokens, batch_size, parts)
        processes.map(lambda part: save(0, part), range(parts.count))
    for index in range(begin, stream.num_layers):
        with stream.layer(index) as layer:
            processes.map(run, range(parts.count))
        progress()
        if index + 1 < stream.num_layers:
            parts.take(snapshots, "forward", lambda index=index: {"layer": index + 1})
    store.filled = True
    return hidden


def backward_sweep(
    opened: Source,
    store: BoundaryStore,
    final: Tensor | None,
    parts: Parts,
    *,
    gradients: bool = True,
    seed: int = 0,
    snapshots: Snapshots | None = None,
    first_tokens: Sequence[int] = (0,),
) -> Iterator[SweptLayer]:
    """Yield the statistics of every layer with keys and values, from last to first.

    Args:
        final: the forward sweep's result [n, T, D], overwritten by gradients; None if a snapshot has the state.
        gradients: whether to compute gradients of the loss (labels sampled from the model with ``seed``).
        snapshots: state to resume from after an interruption; finished layers are not yielded again.
        first_tokens: numbers of first tokens per sequence to exclude; statistics are computed for each.
    """
    stream, snapshots = opened.stream, snapshots or Snapshots()
    if state := snapshots.last("backward"):
        upstream, end, store.filled = state["upstream"], state["layer"], True
        upstream = None if upstream is None else parts.pick(upstream, store.memory)
    else:
        upstream, end = _upstream(stream, final, parts, seed) if gradients else None, stream.num_layers

    def save_state(index: int) -> None:
        state = {"layer": index}
        parts.take(
            snapshots, "backward", lambda: state | {"upstream": None if upstream is None else parts.whole(upstream)}
        )

    stateful = opened.stateful
    for index in reversed(range(end)):
        if index in stateful:  # no keys and values: only propagate gradients
            if gradients:
                _pass_gradients(stream, index, store.load(index), upstream, parts)
            save_state(index)
            continue
        yield _swept(stream, index, opened.anatomy(index), store, upstream, parts, first_tokens)
        save_state(index)


def _swept(
    stream: LayerStream,
    index: int,
    anatomy: AttentionAnatomy,
    store: BoundaryStore,
    upstream: Tensor | None,
    parts: Parts,
    first_tokens: Sequence[int],
) -> SweptLayer:
    """Recompute a layer and replace gradients at its output [n, T, D], if any, by those at its input, in place."""
    anatomy, hidden, gradients = anatomy.to(stream.device, stream.dtype), store.load(index), upstream is not None
    moments = [
        MomentAccumulator(
            anatomy,
            gradients=gradients,
            hold=store.memory.hold,
            parts=parts.count,
            processes=parts.processes,
            first=first,
        )
        for first in first_tokens
    ]
    inputs = store.memory.empty((parts.num_local, *hidden.shape[1:]), stream.dtype)

    def add(part: int) -> None:
        for rows, own in parts.batches(part):
            captured = CapturedAttention(anatomy, gradients=gradients)
            leaf = hidden[rows].to(stream.device, stream.dtype).requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                out = layer(leaf, captured)
            if gradients:
                out.backward(upstream[own].to(out))
                upstream[own] = leaf.grad.to(upstream)
            for each in moments:
                each.add(captured.projection, captured.inputs, part)
            inputs[own] = captured.inputs.to(inputs)
            give_back(hidden, inputs, *([upstream] if gradients else []))

    with stream.layer(index) as layer:
        moments[0].collect(add, *moments[1:])
    statistics = [each.result() for each in moments]
    if not all(each.is_finite() for each in statistics):
        raise overflow(stream.reader, f"calibration statistics of layer {index}")
    return SweptLayer(index, anatomy, statistics, inputs)


def _pass_gradients(stream: LayerStream, index: int, hidden: Tensor, upstream: Tensor, parts: Parts) -> None:
    """Backpropagate gradients [n, T, D] from a layer's output to its input, in place."""
    with stream.layer(index) as layer:

        def run(part: int) -> None:
            for rows, own in parts.batches(part):
                leaf = hidden[rows].to(stream.device, stream.dtype).requires_grad_()
                with torch.enable_grad():
                    out = layer(leaf)
                out.backward(upstream[own].to(out))
                upstream[own] = leaf.grad.to(upstream)
                give_back(hidden, upstream)

        parts.processes.map(run, range(parts.count))


def _upstream(stream: LayerStream, final: Tensor, parts: Parts, seed: int) -> Tensor:
    """Replace the last layer's output [n, T, D] by the loss gradient at it, in place.

    Labels are sampled from the model, with one generator for the sequences of all processes.
    """
    generator, length = torch.Generator().manual_seed(seed), final.shape[1]
    for part in range(parts.count):
        if part not in parts.own:
            rows = parts.rows(part)
            sampling_numbers((rows.stop - rows.start) * length, generator)
            continue
        for _, own in parts.batches(part):
            final[own] = stream.sampled_loss_gradient(final[own], generator)
            give_back(final)
    return final
