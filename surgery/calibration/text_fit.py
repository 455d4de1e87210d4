"""Fit of a calibration text: how well a source predicts the text that it is calibrated on and measured with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surgery.common.human import perplexity, perplexity_text
from surgery.common.progress import Progress
from surgery.eval.tasks.loss import MEMORIZED
from surgery.running.layer_stream import LayerStream, blocks_of

SEQUENCES = 4
"""Sequences of each kind of use that are read, the first ones."""
TOKENS = 256
"""The first tokens of each: enough to see that a text does not fit, for a small part of a pass over all of it."""
FAR_OFF, BY_HEART = 5.0, 0.3
"""Mean losses beyond which a text does not fit: the source cannot read it, or has memorized it."""


@torch.no_grad()
def measure_fit(
    stream: LayerStream,
    texts: Mapping[str, Tensor],
    order: Mapping[str, Sequence[str] | None],
    batch_size: int,
    progress: Progress,
) -> dict[str, dict[str, dict[str, float]]]:
    """The source's loss on the beginnings of the first sequences [N, T] of every text, by the kind of each sequence.

    Args:
        texts: by what they are used for; ``order``: the kind of each sequence; None: all are of one, called "text".

    Returns:
        By use and kind "loss" (nats per token), "memorised" (share of tokens below `MEMORIZED`), "tokens" that were
        predicted.
    """
    texts = {use: tokens[:SEQUENCES, :TOKENS] for use, tokens in texts.items()}
    hidden = {use: stream.embed(tokens) for use, tokens in texts.items()}
    with progress.phase("source's loss on the text", stream.num_layers) as advance:
        for start, stop in blocks_of(stream.config):
            with stream.block(start, stop) as layers:
                for each in hidden.values():
                    stream.run_layer(layers, each, batch_size)
            advance(stop - start)
    return {
        use: _by_kind(stream.token_losses(hidden[use], tokens).view(len(tokens), -1).cpu(), order[use])
        for use, tokens in texts.items()
    }


def _by_kind(losses: Tensor, order: Sequence[str] | None) -> dict[str, dict[str, float]]:
    """Group the losses [N, T - 1] of sequences by kind of text."""
    kinds = list(order or ["text"] * len(losses))[: len(losses)]
    fit = {}
    for kind in dict.fromkeys(kinds):
        own = losses[[place for place, other in enumerate(kinds) if other == kind]]
        memorized = (own < MEMORIZED).double().mean()
        fit[kind] = {"loss": float(own.mean()), "memorised": float(memorized), "tokens": own.numel()}
    return fit


def misfits(fit: dict[str, dict[str, float]], *, chats: bool) -> list[str]:
    """Return what is wrong with a calibration text, a line each.

    Args:
        chats: whether the source is a model for conversations, and none are in the text.
    """
    lines = []
    for kind, measured in fit.items():
        loss = f"{measured['loss']:.2f} nats per token (perplexity {perplexity_text(perplexity(measured['loss']))})"
        loss_text = f"the source's loss on the {kind} is {loss}"
        if measured["loss"] > FAR_OFF:
            lines.append(f"{loss_text}: it was not trained on such text; give --calibration text that it has learned")
        elif measured["loss"] < BY_HEART:
            lines.append(
                f"{loss_text}: it has memorized this text, which hides damage. Give other text with --calibration"
            )
    if chats:
        lines.append("the source is a model for conversations and calibrated without: add chat=0.2 to --calibration")
    return lines
