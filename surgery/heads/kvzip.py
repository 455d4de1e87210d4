"""KVzip scores of heads: attention while the model repeats its context.

KVzip (Kim et al., arXiv:2505.23416): a model that repeats a text attends to the KV pairs that hold its content, for any
later question. A pair's score is its largest attention over the queries of the repetition and the query heads of its
group (eq. 2 and 3 there). A head's score, in the variant without eviction at run time, is the maximum over its pairs
(published code: over the context). There a head loses its whole context or nothing; here it would keep sinks and recent
tokens, so only attention on the remaining pairs counts.
"""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor

from surgery.common.errors import SurgeryError
from surgery.eval.sequences import tokenize
from surgery.eval.session import device_of
from surgery.heads.attention_rows import attention_rows, row_pieces
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.heads.ties import break_ties
from surgery.running.attention_tap import AttentionCall, tap_attention

SAMPLES = 8
CHUNK = 2000
"""Context tokens to repeat at a time, as in the paper."""
REMINDER = 8
"""Tokens before a chunk, other than the first, that the instruction quotes as its start."""
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "


def score(session: ScoringSession) -> HeadScores:
    """Score heads by the largest attention, from 0 to 1, on a pair that streaming would evict, as a mean over texts.

    The context has ``settings.length`` tokens less the instruction and one chunk. Each chunk is repeated after the
    whole context in its own forward pass. As in the published code, the softmax is over the first token, the chunk's
    pairs and the repetition. Ties are ordered by the mean over pairs.

    Parts, all [L, G] float32: ``largest`` and ``mean`` over the pairs that streaming would evict, and
    ``largest_of_all``, KVzip's own score, over all pairs but the first token's. Raises SurgeryError: sequences are too
    short for a context longer than sinks and recent tokens, and its repetition.
    """
    settings = session.settings
    later = len(tokenize(session.tokenizer, REPEAT_FROM)) + REMINDER
    room = settings.length - max(len(tokenize(session.tokenizer, REPEAT)), later)
    context = max(room // 2, room - CHUNK)
    if context < max(settings.sinks + REMINDER, settings.recent):
        raise SurgeryError(
            f"sequences of {settings.length} tokens leave {max(context, 0)} to repeat, which {settings.sinks} sinks "
            f"and {settings.recent} recent tokens nearly cover; raise --length"
        )
    texts = session.text(session.samples(SAMPLES))[:, :context]
    with session.progress.phase("repeating the context", len(texts), "sequence") as advance:
        samples = []
        for text in texts:
            samples.append(_summary(session, text))
            advance()
    largest, mean, of_all = torch.stack(samples).mean(0)
    parts = {"largest": largest.float(), "mean": mean.float(), "largest_of_all": of_all.float()}
    return HeadScores(
        break_ties(largest, mean), parts, {"context_tokens": context, "chunk_tokens": min(CHUNK, context)}
    )


@torch.no_grad()
def _summary(session: ScoringSession, context: LongTensor) -> Tensor:
    """Compute the three parts of `score` [3, L, G] float64 for one context [T]."""
    dropped, of_all = pairs = torch.zeros(2, session.layers, session.kv_heads, len(context))
    start = 1  # the first token is an attention sink
    while start < len(context):
        stop = min(start + CHUNK, len(context))
        asking = tokenize(session.tokenizer, REPEAT if start == 1 else REPEAT_FROM)
        reminder = context[start - REMINDER : start] if start > 1 else context[:0]
        tokens = torch.cat((context, torch.tensor(asking, dtype=torch.long), reminder, context[start:stop]))
        _update_pairs(session, tokens, range(len(context), len(tokens)), range(start, stop), pairs)
        start = stop
    mean = dropped[..., max(1, session.settings.sinks) :].mean(-1, dtype=torch.float64)
    return torch.stack((dropped.amax(-1), mean, of_all.amax(-1)))


def _update_pairs(session: ScoringSession, tokens: LongTensor, repetition: range, chunk: range, pairs: Tensor) -> None:
    """Update ``pairs`` [2, L, G, T] in place with the repetition's largest attention on the chunk."""
    queries, chunk_positions = torch.tensor(repetition), torch.tensor(chunk)
    keys = torch.cat((torch.zeros(1, dtype=torch.long), chunk_positions, queries))
    chunk_slice = slice(chunk.start, chunk.stop)

    def record(call: AttentionCall) -> Tensor:
        for rows in row_pieces(call, queries):
            attention = attention_rows(call, rows, keys)[0, :, :, 1 : 1 + len(chunk)]
            dropped = (rows[:, None] - chunk_positions >= session.settings.recent) & (
                chunk_positions >= session.settings.sinks
            )
            for pair, counted in zip(pairs, (attention * dropped.to(attention.device), attention), strict=True):
                largest = counted.amax(1).view(call.kv_heads, -1, len(chunk)).amax(1)
                pair[call.layer, :, chunk_slice] = torch.maximum(pair[call.layer, :, chunk_slice], largest.cpu())
        return call.output()

    with tap_attention(session.model, record):
        session.model.base_model(input_ids=tokens[None].to(device_of(session.model)), use_cache=False)
