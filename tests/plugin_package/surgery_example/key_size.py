"""Scores heads by the size of their key weights: the simplest thing that is a number a head."""

import torch

from surgery.heads.scorer import HeadScores


def score(session):
    """The Frobenius norm of every KV head's rows of k_proj, [layers, KV heads]."""
    weights = [layer.self_attn.k_proj.weight for layer in session.model.model.layers]
    sizes = [weight.unflatten(0, (session.kv_heads, -1)).float().norm(dim=(1, 2)) for weight in weights]
    return HeadScores(torch.stack(sizes).detach().cpu())
