"""Copy score of heads on planted facts: the share of answer tokens at which a head attends most to their source.

Retrieval heads of Wu et al., "Retrieval Head Mechanistically Explains Long-Context Factuality" (arXiv:2404.15574, §2):
at each generated token, a head scores if its largest attention is on the same token within the needle. Its score is the
share of the needle's tokens for which it does, averaged over trials that the model answers mostly right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.eval.logits import LogitReader
from surgery.eval.session import device_of
from surgery.heads.attention_rows import attention_rows, row_pieces
from surgery.heads.needles import NeedleSet
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.heads.ties import break_ties
from surgery.running.attention_tap import AttentionCall, tap_attention

SAMPLES = 16
ANSWERED = 0.5
"""A needle counts if the model predicts more than this share of its answer's tokens."""


def score(session: ScoringSession) -> HeadScores:
    """Compute copy scores, from 0 to 1, with one teacher-forced forward pass per sequence.

    A token of the answer counts for a head if the model predicts it and the predicting query's largest attention is on
    the same token in the fact's line. A KV head has the score of its best query head. Ties, such as the many heads with
    0, are ordered by attention mass on those tokens.

    Parts: ``copy`` and ``mass`` [L, H] float32, of the query heads. Raises SurgeryError: the model answers none of the
    facts.
    """
    needles = session.needles(session.samples(SAMPLES))
    reader = LogitReader(session.model, needles.tokens)
    rows = range(len(needles.tokens))
    with session.progress.phase("copies of needles", len(rows), "sequence") as advance:
        samples = []
        for row in rows:
            samples.append(_copies(session, reader, needles, row))
            advance()
    copy, mass = (torch.cat(part) for part in zip(*samples, strict=True))
    questions = needles.fact_numbers.unique().numel() - 1
    facts = {"needles": questions * len(rows), "needles_answered": len(copy)}
    if not len(copy):
        raise SurgeryError(
            f"the model answers none of {facts['needles']} planted facts, so no head copies one: "
            "use another --method, or a shorter --length or fewer --facts"
        )
    copy, mass = copy.mean(0), mass.mean(0)
    best = [part.view(session.layers, session.kv_heads, -1).amax(-1) for part in (copy, mass)]
    return HeadScores(break_ties(*best), {"copy": copy.float(), "mass": mass.float()}, facts)


@torch.no_grad()
def _copies(session: ScoringSession, reader: LogitReader, needles: NeedleSet, row: int) -> tuple[Tensor, Tensor]:
    """Compute copy scores and attention mass [F, L, H] float64 for the F answered facts of one sequence."""
    tokens = needles.tokens[row]
    answer_positions = needles.answers[row].nonzero()[:, 0]
    numbers, answers = needles.fact_numbers[row, answer_positions], tokens[answer_positions]
    start, stop = needles.spans[row][numbers].unsqueeze(-1).unbind(1)
    keys = torch.arange(len(tokens))
    source = (keys >= start) & (keys < stop) & (tokens == answers[:, None])  # [n, T]: the answer's token in its fact
    heads = session.model.config.num_attention_heads
    copies, mass = torch.zeros(2, session.layers, heads, len(answer_positions), dtype=torch.float64)

    def record(call: AttentionCall) -> Tensor:
        for piece in row_pieces(call, torch.arange(len(answer_positions))):
            attention = attention_rows(call, answer_positions[piece] - 1)[0]
            right = source[piece].to(attention.device)
            best = attention.argmax(-1)
            copies[call.layer][:, piece] = right[torch.arange(len(piece)), best].double().cpu()
            mass[call.layer][:, piece] = (attention * right).sum(-1).double().cpu()
        return call.output()

    with tap_attention(session.model, record):
        states = reader.states(tokens[None].to(device_of(session.model)))
    guess = reader.logits(states[:, (answer_positions - 1).to(states.device)]).argmax(-1)[0].cpu()
    right = (guess == answers).double()
    rows_of_copies = [
        torch.stack([(part * right)[..., numbers == fact].mean(-1) for part in (copies, mass)])
        for fact in numbers.unique()
        if right[numbers == fact].mean() > ANSWERED
    ]
    empty = copies.new_zeros(0, 2, session.layers, heads)
    copied, masses = (torch.stack(rows_of_copies) if rows_of_copies else empty).unbind(1)
    return copied, masses
