"""Echo and induction scores of heads on repeated random tokens.

RazorAttention (Tang et al., arXiv:2407.15891, §3.3): in repeated random tokens, only attention can predict the next
token. Retrieval heads are those that attend to earlier occurrences of the token (echo) or to the token after them
(induction). It keeps the 1% of all heads with the best echo and the 14% with the best induction scores.
"""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor

from surgery.common.errors import SurgeryError
from surgery.eval.session import device_of
from surgery.heads.attention_rows import attention_rows, row_pieces
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.running.attention_tap import AttentionCall, tap_attention

SAMPLES = 4
RANDOM_TOKENS, REPETITIONS = 2500, 4
ECHO, INDUCTION = 0.01, 0.14
"""Shares of all heads that RazorAttention keeps by each score."""


def score(session: ScoringSession) -> HeadScores:
    """Score heads by their order in RazorAttention's selection, which takes 1 head by echo for every 14 by induction.

    The score is 1 - the share of the model's heads selected up to and including this one: from 0 to nearly 1, in steps
    of one head and without ties. A KV head has the scores of its best query head. ``settings.length`` limits the
    sequences: below 10,001, fewer than 2500 tokens are repeated.

    Parts: ``echo`` and ``induction`` [L, H] float32, a query head's attention, from 0 to 1, on the same token in all
    earlier repetitions and on the tokens after it, averaged over the queries of all repetitions but the first. Raises
    SurgeryError: sequences are too short for repetitions.
    """
    sequences = repeated_tokens(session, session.samples(SAMPLES))
    period = (sequences.shape[1] - 1) // REPETITIONS
    with session.progress.phase("echo and induction", len(sequences), "sequence") as advance:
        samples = []
        for tokens in sequences:
            samples.append(_attention(session, tokens, period))
            advance()
    echo, induction = torch.stack(samples).mean(0)
    best = [part.view(session.layers, session.kv_heads, -1).amax(-1) for part in (echo, induction)]
    facts = {"repeated_tokens": period, "repetitions": REPETITIONS}
    return HeadScores(selection_order(*best), {"echo": echo.float(), "induction": induction.float()}, facts)


def repeated_tokens(session: ScoringSession, count: int) -> LongTensor:
    """Draw ``count`` sequences [N, 1 + 4 P]: bos, or another random token without one, and P random tokens four times.

    Raises SurgeryError: the length has no room for four repetitions of four tokens.
    """
    vocabulary = session.model.config.vocab_size
    special = set(session.tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(min(vocabulary, len(session.tokenizer))) if token not in special])
    period = min(RANDOM_TOKENS, (session.settings.length - 1) // REPETITIONS, len(ordinary))
    if period < REPETITIONS:
        raise SurgeryError(f"{session.settings.length} tokens are too few for repeated text; raise --length")
    generator = torch.Generator().manual_seed(session.seed)
    rows = []
    for _ in range(count):
        # Without replacement, so that each token has one earlier occurrence per repetition.
        drawn = ordinary[torch.randperm(len(ordinary), generator=generator)[: period + 1]]
        bos = session.tokenizer.bos_token_id
        first = drawn[-1:] if bos is None else torch.tensor([bos])
        rows.append(torch.cat((first, drawn[:period].repeat(REPETITIONS))))
    return torch.stack(rows)


def selection_order(echo: Tensor, induction: Tensor) -> Tensor:
    """Compute 1 - the share of heads selected up to each head, by both scores in RazorAttention's proportion.

    Args:
        echo, induction: [L, G].

    Returns:
        [L, G] float32. Heads selected at the same time are ordered by induction, then by index.
    """
    needed = torch.minimum(_ranks(echo) / ECHO, _ranks(induction) / INDUCTION)
    order = sorted(
        range(needed.numel()), key=lambda head: (needed.flatten()[head].item(), -induction.flatten()[head].item())
    )
    scores = torch.empty(needed.numel(), dtype=torch.float64)
    scores[order] = 1 - torch.arange(1, len(order) + 1, dtype=torch.float64) / len(order)
    return scores.view_as(needed).float()


def _ranks(scores: Tensor) -> Tensor:
    """Return the rank of each head by descending score, from 1, float64; ties in the heads' order."""
    ranks = torch.empty(scores.numel(), dtype=torch.float64)
    order = scores.flatten().argsort(descending=True, stable=True)
    ranks[order] = torch.arange(1, len(order) + 1, dtype=torch.float64)
    return ranks.view_as(scores)


@torch.no_grad()
def _attention(session: ScoringSession, tokens: LongTensor, period: int) -> Tensor:
    """Compute echo and induction scores [2, L, H] float64 of one sequence."""
    queries = torch.arange(1 + period, len(tokens))
    sums = torch.zeros(2, session.layers, session.model.config.num_attention_heads, dtype=torch.float64)

    def record(call: AttentionCall) -> Tensor:
        for rows in row_pieces(call, queries):
            attention = attention_rows(call, rows)[0]
            back = rows[:, None] - period * torch.arange(1, REPETITIONS)
            earlier = (back >= 1).to(attention.device)
            for kind, keys in enumerate((back, back + 1)):
                at = keys.clamp(min=0).to(attention.device).expand(len(attention), -1, -1)
                sums[kind, call.layer] += (attention.gather(-1, at) * earlier).sum((-1, -2), dtype=torch.float64).cpu()
        return call.output()

    with tap_attention(session.model, record):
        session.model.base_model(input_ids=tokens[None].to(device_of(session.model)), use_cache=False)
    return sums / len(queries)
