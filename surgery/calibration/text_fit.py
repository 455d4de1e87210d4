"""Fit of a text: the source's loss on the text for calibration and held-out measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surgery.common.human import perplexity, perplexity_text
from surgery.common.progress import Progress
from surgery.eval.tasks.loss import MEMORIZED
from surgery.running.layer_stream import LayerStream, blocks_of

SEQUENCES = 4
"""Number of first sequences to read for each use."""
TOKENS = 256
"""Number of first tokens of each: enough to detect a misfit, at a fraction of a full pass."""
FAR_OFF, BY_HEART = 5.0, 0.3
"""Mean losses above which the source was not trained on such text, and below which it has memorized it."""


@torch.no_grad()
def measure_fit(
    stream: LayerStream,
    texts: Mapping[str, Tensor],
    order: Mapping[str, Sequence[str] | None],
    batch_size: int,
    progress: Progress,
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure the source's loss on the start of the first sequences [N, T] of each text, by use and kind.

    Returns "loss" (nats per token), "memorised" (share of tokens with a loss below `MEMORIZED`) and "tokens"
    (predicted). Without ``order`` all are of one kind, "text".
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
        own = losses[[index for index, other in enumerate(kinds) if other == kind]]
        memorized = (own < MEMORIZED).double().mean()
        fit[kind] = {"loss": float(own.mean()), "memorised": float(memorized), "tokens": own.numel()}
    return fit


def misfits(fit: dict[str, dict[str, float]], *, chats: bool) -> list[str]:
    """Return warnings about a calibration text, one line each.

    Args:
        chats: whether the source has a chat template but the text has no conversations.
    """
    lines = []
    for kind, measured in fit.items():
        loss = f"{measured['loss']:.2f} nats per token (perplexity {perplexity_text(perplexity(measured['loss']))})"
        loss_text = f"the source's loss on the {kind} is {loss}"
        if measured["loss"] > FAR_OFF:
            lines.append(
                f"{loss_text}: it was not trained on such text; choose --calibration text like its training data"
            )
        elif measured["loss"] < BY_HEART:
            lines.append(
                f"{loss_text}: it has memorized this text, which hides degradation; choose another --calibration text"
            )
    if chats:
        lines.append(
            "the source is a chat model, but the calibration text has no conversations; add chat=0.2 to --calibration"
        )
    return lines
