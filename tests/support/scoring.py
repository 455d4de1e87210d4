"""Scoring sessions on tiny models."""

from pathlib import Path

import torch
from sessions import Bars
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.heads.needles import needle_sequences
from surgery.heads.scorer import ScoringSession
from surgery.heads.settings import HeadSettings
from surgery.heads.streaming import mixed_output
from surgery.running.attention_tap import tap_attention

SHAPE = {"sinks": 4, "recent": 12, "length": 96, "facts": 1}


def scoring_session(checkpoint: Path, **settings) -> ScoringSession:
    """A session on random text, in float32 on the CPU."""
    options = HeadSettings(**{**SHAPE, **settings})
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    drawn = torch.randint(3, 4096, (40, options.length), generator=torch.Generator().manual_seed(options.seed))
    filler = drawn.flatten().tolist()

    def needles(count: int):
        return needle_sequences(tokenizer, filler, count, options.length, options.facts, options.seed)

    return ScoringSession(model, tokenizer, options, lambda count: drawn[:count], needles, options.seed, Bars())


def streaming_heads(model, streams, sinks: int, recent: int):
    """Let the KV heads of ``streams`` [L, G] stream in a model, for the length of a ``with`` block."""
    return tap_attention(model, lambda call: mixed_output(call, streams[call.layer], sinks, recent))
