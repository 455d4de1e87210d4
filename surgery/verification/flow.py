"""KV peak and footprint of a model that runs a few layers at a time; `surgery.eval.kv_flow` defines them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from surgery.common.errors import SurgeryError
from surgery.eval.kv_flow import EntryCounter, UpdateWatch, causal_entries
from surgery.running.attention_tap import tap_attention


@dataclass(frozen=True)
class Flow:
    """KV peak and attention footprint of prefilling a prompt and decoding tokens after it.

    Attributes:
        peak_bytes: peak bytes of keys and values, in the dtype of the run.
        footprint: visited query-key pairs as a share of full causal attention.
    """

    peak_bytes: int
    footprint: float


@dataclass
class FlowWatch:
    """Recorder of layers that process the same tokens one layer at a time, as if they ran in one model."""

    _counter: EntryCounter = field(default_factory=EntryCounter)
    _blocks: list[list[list[int]]] = field(default_factory=list)

    @contextmanager
    def block(self, decoder: nn.Module) -> Iterator[None]:
        """Record all forward passes of a decoder of one or more layers in a ``with`` block."""
        watch, passes = UpdateWatch(), []

        def begin(*_) -> None:
            passes.append([watch.held, 0, 0])
            watch.peak = 0

        def end(*_) -> None:
            passes[-1][1:] = watch.peak, watch.held

        hooks = [decoder.register_forward_pre_hook(begin), decoder.register_forward_hook(end)]
        try:
            with watch.updates(), tap_attention(decoder, self._counter):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._blocks.append(passes)

    def flow(self, layers: int, heads: int, tokens: int) -> Flow:
        """Compute peak and footprint of all layers together, from query heads per layer and tokens over all passes."""
        peak = 0
        for passes in zip(*self._blocks, strict=True):
            others = sum(before for before, _, _ in passes)
            for before, live, after in passes:
                peak = max(peak, others - before + live)
                others += after - before
        return Flow(peak, self._counter.entries / (layers * heads * causal_entries(tokens)))


def check_flow(path, measured: Flow, predicted: Flow) -> None:
    """Raise SurgeryError if the measured peak or footprint differs from the prediction."""
    if measured.peak_bytes != predicted.peak_bytes:
        raise SurgeryError.at(
            path, f"peak of the KV cache is {measured.peak_bytes} bytes, predicted {predicted.peak_bytes}"
        )
    if not abs(measured.footprint - predicted.footprint) <= 1e-9:
        raise SurgeryError.at(
            path,
            f"attention visited {measured.footprint:.6f} of the query-key pairs, predicted {predicted.footprint:.6f}",
        )


def predicted_flow(model, prompt: int, steps: int) -> Flow:
    """Return the flow that a model of the custom class predicts for a prompt and decode steps of one sequence."""
    return Flow(model.kv_peak_bytes(1, prompt, prompt, steps), model.kv_footprint(prompt, steps))
