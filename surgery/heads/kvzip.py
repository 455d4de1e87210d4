"""KVzip: attention of the heads while the model repeats its context.

KVzip (Kim et al., arXiv:2505.23416): a model that is asked to repeat a text attends to the pairs that it needs to say
what is in it, whatever will be asked later. A pair's score is its largest attention over the queries of the repetition
and the query heads of its group (eq. 2 and 3 there); a head's score, in its variant without eviction at run time, the
largest of its pairs (published code: the maximum over the context). There a head loses its whole context or nothing;
here it would keep its sinks and what is recent, so only attention on the other pairs counts.
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
from surgery.running.attention_tap import AttentionCall, tapped

SAMPLES = 8
CHUNK = 2000
"""Tokens of the context that are repeated at a time, as in the paper."""
REMINDER = 8
"""Tokens before a later chunk that say where to begin."""
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "


def score(session: ScoringSession) -> HeadScores:
    """Largest attention, from 0 to 1, on a pair that streaming would drop, while the context is repeated.

    The mean over texts. The context takes what of ``settings.length`` the instruction and one chunk leave, and every
    chunk is repeated after the whole context in a forward pass of its own. As in the published code, the softmax is
    over the first token, the chunk's own pairs and the repetition. Scores that tie are ordered by the mean over pairs.

    Parts, all [L, G] float32: ``largest`` and ``mean`` over the pairs that streaming would drop, and
    ``largest_of_all``, KVzip's own score, over all pairs but the first token's.

    Raises:
        SurgeryError: sequences are too short for a context that does not fit in sinks and recent tokens, and its
            repetition.
    """
    settings = session.settings
    later = len(tokenize(session.tokenizer, REPEAT_FROM)) + REMINDER
    room = settings.length - max(len(tokenize(session.tokenizer, REPEAT)), later)
    context = max(room // 2, room - CHUNK)
    if context < max(settings.sinks + REMINDER, settings.recent):
        raise SurgeryError(
            f"sequences of {settings.length} tokens hold {max(context, 0)} to repeat, which {settings.sinks} sinks and "
            f"{settings.recent} recent tokens nearly cover: give a longer --length"
        )
    texts = session.text(session.samples(SAMPLES))[:, :context]
    with session.progress.phase("repeating the context", len(texts), "sequence") as advance:
        samples = session.processes.map(lambda row: _summary(session, texts[row]), range(len(texts)), advance)
    largest, mean, of_all = torch.stack(samples).mean(0)
    parts = {"largest": largest.float(), "mean": mean.float(), "largest_of_all": of_all.float()}
    return HeadScores(
        break_ties(largest, mean), parts, {"context_tokens": context, "chunk_tokens": min(CHUNK, context)}
    )


@torch.no_grad()
def _summary(session: ScoringSession, context: LongTensor) -> Tensor:
    """The three parts [3, L, G] float64 of one context [T]."""
    dropped, of_all = pairs = torch.zeros(2, session.layers, session.kv_heads, len(context))
    start = 1  # what is first gets much attention from all heads, whatever it says
    while start < len(context):
        stop = min(start + CHUNK, len(context))
        asking = tokenize(session.tokenizer, REPEAT if start == 1 else REPEAT_FROM)
        reminder = context[start - REMINDER : start] if start > 1 else context[:0]
        tokens = torch.cat((context, torch.tensor(asking, dtype=torch.long), reminder, context[start:stop]))
        _look(session, tokens, range(len(context), len(tokens)), range(start, stop), pairs)
        start = stop
    mean = dropped[..., max(1, session.settings.sinks) :].mean(-1, dtype=torch.float64)
    return torch.stack((dropped.amax(-1), mean, of_all.amax(-1)))


def _look(session: ScoringSession, tokens: LongTensor, repetition: range, chunk: range, pairs: Tensor) -> None:
    """Writes the largest attention of the repetition on the chunk into its places of ``pairs`` [2, L, G, T]."""
    queries, places = torch.tensor(repetition), torch.tensor(chunk)
    keys = torch.cat((torch.zeros(1, dtype=torch.long), places, queries))
    here = slice(chunk.start, chunk.stop)

    def look(call: AttentionCall) -> Tensor:
        for rows in row_pieces(call, queries):
            attention = attention_rows(call, rows, keys)[0, :, :, 1 : 1 + len(chunk)]
            dropped = (rows[:, None] - places >= session.settings.recent) & (places >= session.settings.sinks)
            for pair, counted in zip(pairs, (attention * dropped.to(attention.device), attention), strict=True):
                largest = counted.amax(1).view(call.kv_heads, -1, len(chunk)).amax(1)
                pair[call.layer, :, here] = torch.maximum(pair[call.layer, :, here], largest.cpu())
        return call.output()

    with tapped(session.model, look):
        session.model.base_model(input_ids=tokens[None].to(device_of(session.model)), use_cache=False)
