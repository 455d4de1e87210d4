"""Stages of a conversion, run side by side through the model on held-out text.

The loss of each stage shows where the loss of a conversion comes from; the reloaded checkpoint must equal the last one.
For exact stages, the logits of a short text are compared with the source's instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

import torch
from torch import Tensor, nn

from surgery.calibration.held_out import HeldOut, Score, logit_difference
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import CapturedAttention
from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.transforms.algebra import relative

# Tokens of the first held-out sequence on which exact stages are compared with the source.
EXACT_TOKENS = 128
# Sequences on which the output error of each layer is measured; it converges long before the loss does.
ERROR_SEQUENCES = 2
# Held-out sequences of stages whose loss decides nothing. They show the rough share of the loss only: partial RoPE
# increased the loss of SmolLM2-135M by 0.60 nats on two sequences and by 0.50 on four.
STEP_SEQUENCES = 2

Form = Callable[[], nn.Module]
"""Function that builds a surrogate attention module; called late, since exact forms are as wide as the whole cache."""


class StageTracker:
    """Hidden states of every stage, advanced layer by layer.

    ``stages`` follow the source in order. Exact stages must equal the source and run on a short text only; ``steps``,
    whose loss decides nothing, run on a few sequences. ``hidden`` are the states by stage, [N, T, D]; [1, EXACT_TOKENS,
    D] for exact ones.
    """

    def __init__(
        self,
        stream: LayerStream,
        held_out: HeldOut,
        batch_size: int,
        stages: tuple[str, ...],
        *,
        exact: Collection[str] = (),
        steps: Collection[str] = (),
    ):
        self._stream, self._held_out, self._batch_size, self._exact = stream, held_out, batch_size, exact
        embedded = stream.embed(held_out.tokens)
        rows = {stage: embedded for stage in ("source", *stages)}
        rows |= dict.fromkeys(exact, embedded[:1, :EXACT_TOKENS])
        rows |= dict.fromkeys(steps, embedded[: min(STEP_SEQUENCES, held_out.texts) or STEP_SEQUENCES])
        self.hidden: dict[str, Tensor] = {stage: hidden.clone() for stage, hidden in rows.items()}

    def advance(
        self, layer: StreamedLayer, anatomy: AttentionAnatomy, forms: dict[str, Form], lossy: Collection[str]
    ) -> dict[str, float]:
        """Run one layer in every stage; return the output error of its attention in each lossy stage.

        The error is relative, ``‖converted - source‖ / ‖source‖`` on the source's inputs. ``forms`` are the layer's
        attention in every stage but the source, on the stream's device and in its dtype.
        """
        captured = self._source_output(layer, anatomy)
        errors = {}
        for name, form in forms.items():
            attention = form()
            if name in lossy:
                errors[name] = _relative_error(attention, captured)
            self._stream.run_layer(layer, self.hidden[name], self._batch_size, attention)
        self._stream.run_layer(layer, self.hidden["source"], self._batch_size)
        return errors

    def skip(self, layer: StreamedLayer, attention: nn.Module | None) -> None:
        """Run one layer that all stages leave unchanged, with ``attention`` in place of its attention if given."""
        for name, hidden in self.hidden.items():
            if name != "source":
                self._stream.run_layer(layer, hidden, self._batch_size, attention)
        self._stream.run_layer(layer, self.hidden["source"], self._batch_size)

    def sample(self) -> Tensor:
        """Return the inputs to the source's next layer for the sequences on which errors are measured."""
        return self.hidden["source"][:ERROR_SEQUENCES].to(self._stream.device, self._stream.dtype)

    def scores(self) -> dict[str, Score]:
        """Compute the loss and recall of every stage after all layers have run.

        Exact stages get the difference of their logits instead; steps the source's loss plus their increase on few
        sequences.
        """
        return {stage: self._score(stage, hidden) for stage, hidden in self.hidden.items()}

    def _score(self, stage: str, hidden: Tensor) -> Score:
        stream, source = self._stream, self.hidden["source"]
        if stage in self._exact:
            return Score(None, None, logit_difference(stream, source[:1, : hidden.shape[1]], stream, hidden))
        texts, tokens = len(hidden), self._held_out.tokens
        if stage == "source" and self._held_out.texts:
            return Score(float(self._source_losses.mean()), self._held_out.answered(stream, hidden)[0])
        if texts >= self._held_out.texts:
            return self._held_out.score(stream, hidden)
        loss_increase = (
            stream.token_losses(hidden, tokens[:texts]) - self._source_losses[: texts * (tokens.shape[1] - 1)]
        )
        return Score(float(self._source_losses.mean() + loss_increase.mean()), None, sequences=texts)

    @cached_property
    def _source_losses(self) -> Tensor:
        """Losses of the source on all tokens of text, after all layers have run."""
        texts = self._held_out.texts
        return self._stream.token_losses(self.hidden["source"][:texts], self._held_out.tokens[:texts])

    @torch.no_grad()
    def _source_output(self, layer: StreamedLayer, anatomy: AttentionAnatomy) -> CapturedAttention:
        captured = CapturedAttention(anatomy.to(self._stream.device, self._stream.dtype))
        captured(layer.attention_inputs(self.sample()))
        return captured


@torch.no_grad()
def _relative_error(attention: nn.Module, source: CapturedAttention) -> float:
    norms = torch.stack([(attention(source.inputs)[0] - source.outputs).norm(), source.outputs.norm()])
    return relative(*norms.tolist())
