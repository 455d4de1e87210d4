"""Every stage of a conversion carried through the model side by side on held-out text.

Of an MLA conversion: source → merged → rotated are exact, partial RoPE and truncated each lose something; what is
written and loaded again must equal the last. One loss per stage says where a conversion's loss comes from. Exact stages
have none to tell: a short text shows that their logits are the source's.
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

# Tokens of the first held-out sequence that exact stages are compared with the source on.
EXACT_TOKENS = 128
# Sequences on which a layer's own output error is measured; it settles long before the loss does.
ERROR_SEQUENCES = 2
# Held-out texts that a stage passes on whose loss no choice hangs. What it loses on them tells its share of the loss,
# not its digits: SmolLM2-135M with partial RoPE lost 0.60 nats on two texts and 0.50 on four.
STEP_SEQUENCES = 2

Form = Callable[[], nn.Module]
"""Make a surrogate module of a layer's attention; called when it is needed, as exact forms are as wide as the whole
cache."""


class StageTracker:
    """Hidden states of every stage, advanced layer by layer.

    Args:
        stream: the source model.
        held_out: text and recall prompts.
        batch_size: sequences at a time.
        stages: names of the stages after the source, in order.
        exact: those of them that must compute what the source does; they pass a short text only.
        steps: those between which nothing is chosen; they pass a few texts only.

    Attributes:
        hidden: by stage, [N, T, D]; of exact stages [1, EXACT_TOKENS, D], of steps the first few rows.
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
        """Runs one layer in every stage.

        Args:
            anatomy: the source's attention.
            forms: the layer's attention in every stage but the source, on the stream's device and in its dtype.
            lossy: the stages whose errors are measured.

        Returns:
            The layer's own relative output error in each lossy stage, ``‖converted - source‖ / ‖source‖`` on the
            source's inputs.
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
        """Runs one layer that all stages leave unchanged, with ``attention`` in the place of its own if given."""
        for name, hidden in self.hidden.items():
            if name != "source":
                self._stream.run_layer(layer, hidden, self._batch_size, attention)
        self._stream.run_layer(layer, self.hidden["source"], self._batch_size)

    def sample(self) -> Tensor:
        """Return the source's inputs to its next layer, for the sequences on which errors are measured."""
        return self.hidden["source"][:ERROR_SEQUENCES].to(self._stream.device, self._stream.dtype)

    def scores(self) -> dict[str, Score]:
        """Loss and recall of every stage, once all layers have passed.

        Of exact stages how far logits are off; of those that passed a few texts the source's loss and what they lost on
        these.
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
        """Losses of all tokens of text in the source, once all layers have passed."""
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
