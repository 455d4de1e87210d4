"""Whether a layer-wise fit helps, asked of held-out text while it runs.

A fit lowers a layer's error on the text that it sees. On the demo model that is good for the model; on SmolLM2-135M the
whole fit took an hour and ended worse than its start. So each layer keeps its fit only where that brings it nearer to
the source on text that no fit saw, and after a few layers the model itself is asked: with those layers fitted, and with
them in their closed form, the source's own layers behind them. Where the fit wins back little, no further layer is
fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.calibration.held_out import HeldOut
from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.structures.settings import FitSettings
from surgery.structures.stages import ERROR_SEQUENCES, StageRuns
from surgery.transforms.effort import Effort

TRIAL_SEQUENCES = 4
"""Held-out sequences on which the model is asked: differences on the same text settle long before losses do."""
TRIED = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the layers after whose fits the model is asked. The first is all that a fit costs where it is of no use.

Not sooner: the first layer alone of SmolLM2-135M loses 0.0016 nats in closed form.
"""


def asked_after(layers: int) -> set[int]:
    """Numbers of fits after which the model is asked, of a model of so many layers."""
    return {math.ceil(share * layers) for share in TRIED}


def effort_of(settings: FitSettings, layer: int, layers: int) -> Effort:
    """How hard the fit of a layer tries.

    A step less, if two are left, before the model is asked for the first time, as these fits may be dropped: on the
    demo model, two steps in all layers win back 66% of what closed forms lose as MLA at a quarter, three win back 68%.
    """
    early = layer < min(asked_after(layers)) and settings.fit_steps > 2
    return Effort(
        steps=settings.fit_steps - early,
        iterations=settings.fit_iterations,
        queries=settings.fit_queries,
        seed=settings.seed + layer,
    )


@dataclass(frozen=True)
class TrialLosses:
    """Held-out losses of a model whose first layers are the source's, in closed form, and as the fit left them.

    Attributes:
        won: share of the closed forms' divergence from the source that the fit takes back, the divergence to second
            order: half the mean square of what tokens' losses changed by. Losses of few texts are too noisy to ask:
            of SmolLM2-135M, two layers as MLA at a quarter, the fit won 28% on four texts and 44% on four others, of
            the divergence 31 and 33%. The demo model's first layer won 92% there.
    """

    layers: int
    source: float
    closed: float
    fitted: float
    won: float

    @classmethod
    def of(cls, layers: int, source: Tensor, closed: Tensor, fitted: Tensor) -> TrialLosses:
        """Of the losses of the same tokens."""
        moved = float((closed - source).square().sum())
        left = float((fitted - source).square().sum())
        means = (float(losses.mean()) for losses in (source, closed, fitted))
        return cls(layers, *means, 1 - left / moved if moved else 0.0)


@dataclass(frozen=True)
class FitTrial:
    """Stages of a conversion: closed forms, what the fit made of them, and the source beside both.

    Attributes:
        fitted: stages with fits. The first is judged, all are dropped where the fit is given up.
        worth: the least share of the divergence that fits have to win back, as they take longer than all the rest.
    """

    stream: LayerStream
    held_out: HeldOut
    runs: StageRuns
    closed: str
    fitted: tuple[str, ...]
    worth: float

    @torch.no_grad()
    def is_nearer(self, layer: StreamedLayer, closed: nn.Module, fitted: nn.Module) -> bool:
        """Whether a layer hands on what the source does more nearly with its fit than in its closed form.

        Both are given what the layers before hand on. Errors are relative, token by token, as the norms of later layers
        see them: else the few tokens of very large states would be all that counts.
        """
        hidden = self.runs.hidden[self.fitted[0]][:ERROR_SEQUENCES]
        source = self.runs.hidden["source"][: len(hidden)]
        source, hidden = (states.to(self.stream.device, self.stream.dtype) for states in (source, hidden))
        wanted = layer(source).float()

        def error(attention: nn.Module) -> float:
            lost = (layer(hidden, attention).float() - wanted).square().sum(-1)
            return float((lost / wanted.square().sum(-1)).mean())

        return error(fitted) < error(closed)  # an error that is no number is no less than any other

    def is_asked(self, fits: int) -> bool:
        """Whether the model is asked after this many fits."""
        return fits in asked_after(self.stream.num_layers)

    def losses(self, layers: int) -> TrialLosses:
        """Of the model with its first layers in each form, on the last texts.

        What the source makes of these is told once: its stage need not pass them again.
        """
        source, *others = (self.runs.hidden[stage] for stage in ("source", self.closed, self.fitted[0]))
        texts = min(self.held_out.texts, *map(len, others))
        rows = slice(max(0, texts - TRIAL_SEQUENCES), texts)
        once = rows.start >= ERROR_SEQUENCES  # the first ones are looked at in every layer
        states = [source[rows] if once else source[rows].clone(), *(hidden[rows].clone() for hidden in others)]
        passing = states[1:] if self.runs.ahead == (rows.start, rows.stop) else states
        for index in range(layers, self.stream.num_layers):
            with self.stream.layer(index) as layer:
                for hidden in passing:
                    self.stream.run_layer(layer, hidden, len(hidden))
        if once:
            self.runs.ahead = rows.start, rows.stop
        return TrialLosses.of(layers, *(self.stream.token_losses(each, self.held_out.tokens[rows]) for each in states))

    def is_worth_it(self, found: TrialLosses) -> bool:
        """Whether fits go on; a share that is no number is never enough."""
        return found.won > self.worth

    def drop(self) -> None:
        """Takes the fitted stages out of the runs, so that they pass no further layer, and no choice is left."""
        for stage in self.fitted:
            del self.runs.hidden[stage]
        self.runs.become_step(self.closed)
