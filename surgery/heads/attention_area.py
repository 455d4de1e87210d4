"""How far back heads look on average, from their mean query and mean key alone.

The scoring "on the fly" of NVIDIA's kvpress (DuoAttentionPress): the mean query and key of a text before RoPE stand for
a head's taste; repeated over the positions and rotated, their attention shows how it falls off with distance.
"""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor

from surgery.common.errors import SurgeryError
from surgery.eval.session import device_of
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.running.attention_tap import AttentionCall, tapped
from surgery.running.layer_stream import family_behind

SAMPLES = 16
POSITIONS = 500
"""Positions over which the means are repeated, as in kvpress."""


def score(session: ScoringSession) -> HeadScores:
    """Area under the cumulative attention of the last of 500 positions: 1 if it is all on the first, 0.002 on the last.

    Queries and keys are taken as the attention gets them and rotated back with the model's own cosines and sines, so
    that norms and biases of any family are in them. The mean over a KV head's query heads and over the texts.

    Parts: ``area`` [L, H] float32.

    Raises:
        SurgeryError: the model has no half-split RoPE over whole heads.
    """
    texts = session.text(session.samples(SAMPLES))
    with session.progress.phase("mean queries and keys", len(texts), "sequence") as advance:
        samples = session.processes.map(lambda row: _areas(session, texts[row]), range(len(texts)), advance)
    areas = torch.stack(samples).mean(0)
    scores = areas.view(session.layers, session.kv_heads, -1).mean(-1)
    return HeadScores(scores.float(), {"area": areas.float()}, {"positions": POSITIONS})


@torch.no_grad()
def _areas(session: ScoringSession, tokens: LongTensor) -> Tensor:
    """Area [L, H] float64 of every head on one text [T]."""
    model, device = session.model, device_of(session.model)
    angles = _angles(session, max(len(tokens), POSITIONS), device)
    areas = torch.zeros(session.layers, model.config.num_attention_heads, dtype=torch.float64)

    def look(call: AttentionCall) -> Tensor:
        if call.query.shape[-1] != angles.shape[-1]:
            raise SurgeryError(
                f"layer {call.layer} rotates {angles.shape[-1]} of {call.query.shape[-1]} dimensions of a head: "
                "attention-area needs RoPE over whole heads; use another --method"
            )
        query, key = (_rotate(part[0].float(), angles[:, : len(tokens)], -1).mean(1) for part in (call.query, call.key))
        last = _rotate(query[:, None], angles[:, POSITIONS - 1 : POSITIONS])
        keys = _rotate(key[:, None].expand(-1, POSITIONS, -1), angles[:, :POSITIONS])
        keys = keys.repeat_interleave(len(query) // len(key), dim=0)
        attention = call.softmax.normalised(call.softmax.logits(last @ keys.mT).double())[:, 0]
        areas[call.layer] = attention.cumsum(-1).mean(-1).cpu()
        return call.output()

    with tapped(model, look):
        model.base_model(input_ids=tokens[None].to(device), use_cache=False)
    return areas


def _angles(session: ScoringSession, length: int, device: torch.device) -> Tensor:
    """Cosines and sines [2, length, d] float32 of the model's RoPE, with what they scale by."""
    rotary = getattr(session.model.base_model, "rotary_emb", None)
    if rotary is None:
        raise SurgeryError("the model has no rotary_emb: attention-area needs RoPE; use another --method")
    config = session.model.config
    family = family_behind(config)
    if family.interleaved or not all(family.rotates(config, layer) for layer in range(session.layers)):
        raise SurgeryError(
            f"{family.model_type} rotates some layers only, or neighbouring numbers: attention-area needs half-split "
            "RoPE in all; use another --method"
        )
    places = torch.arange(length, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device), places)
    return torch.stack((cos[0], sin[0])).float()


def _rotate(vectors: Tensor, angles: Tensor, sign: int = 1) -> Tensor:
    """RoPE of vectors [h, n, d] by angles [2, n, d], half-split; with sign -1 what undoes it."""
    cos, sin = angles
    first, second = vectors.chunk(2, dim=-1)
    turned = vectors * cos + sign * torch.cat((-second, first), dim=-1) * sin
    return turned if sign > 0 else turned / (cos.square() + sin.square())
