"""Ablation: what the loss rises by when one KV head streams. Slow, and what the other methods are judged by.

A pass over all sequences for each KV head, in the memory of one forward pass. Heads are dealt to the processes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import LongTensor, Tensor

from surgery.eval.logits import LogitReader
from surgery.heads.gates import mean_loss
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.heads.streaming import streaming_heads

SAMPLES = 16
"""Sequences with needles, and as many of text."""


def score(session: ScoringSession) -> HeadScores:
    """Scores a head by the loss at the answers of sequences with needles, in nats a token above the model's own.

    Parts: ``answer_loss`` and ``text_loss`` [L, G] float32, what either loss rises by; text has no planted facts.

    Raises:
        SurgeryError: the text is too short for the sequences.
    """
    samples = session.samples(SAMPLES)
    needles, text = session.needles(samples), session.text(samples)
    shape = session.layers, session.kv_heads
    with torch.no_grad():
        reader = LogitReader(session.model, text)

    def losses(head: int | None) -> Tensor:
        """Mean loss of answers and of text [2] float64, when KV head ``head`` of the whole model's streams."""
        streams = torch.zeros(shape, dtype=torch.bool)
        if head is not None:
            streams.view(-1)[head] = True
        with torch.no_grad(), streaming_heads(session.model, streams, session.settings.sinks, session.settings.recent):
            return torch.stack([_mean(reader, needles.tokens, needles.answers), _mean(reader, text)])

    found = _all_heads(session, losses)
    rise = (found[1:] - found[0]).float().view(*shape, 2)
    parts = {"answer_loss": rise[..., 0].clone(), "text_loss": rise[..., 1].clone()}
    facts = {"samples": samples, "answer_loss": found[0, 0].item(), "text_loss": found[0, 1].item()}
    return HeadScores(parts["answer_loss"], parts, facts)


def _all_heads(session: ScoringSession, losses: Callable[[int | None], Tensor]) -> Tensor:
    """What ``losses`` gives for no head and for each: [1 + L·G, 2]. Those in the journal are not measured again."""
    keys = ["ablation of none", *(f"ablation of {index}" for index in range(session.layers * session.kv_heads))]
    journal, processes = session.journal, session.processes
    missing = [index for index, key in enumerate(keys) if journal.get(key) is None]
    with session.progress.phase("ablation", len(keys), "head") as advance:
        advance(len(keys) - len(missing))
        # In rounds of one head a process, so that the journal knows of all that were finished.
        for start in range(0, len(missing), processes.count):
            turn = missing[start : start + processes.count]
            found = processes.map(lambda index: losses(index - 1 if index else None), turn, advance)
            for index, result in zip(turn, found, strict=True):
                journal.put(keys[index], {"losses": result})
    return torch.stack([journal.get(key)["losses"] for key in keys])


def _mean(reader: LogitReader, tokens: LongTensor, predicted: Tensor | None = None) -> Tensor:
    """Mean over sequences [N, T], run one at a time, of each one's mean loss: a float64 scalar on the CPU."""
    chosen = [None] * len(tokens) if predicted is None else predicted.split(1)
    losses = [mean_loss(reader, row, mask) for row, mask in zip(tokens.split(1), chosen, strict=True)]
    return torch.stack([loss.double().cpu() for loss in losses]).mean()
