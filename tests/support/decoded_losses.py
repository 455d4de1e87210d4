"""Losses of a model that reads texts token by token."""

import torch
from transformers import DynamicCache


@torch.no_grad()
def decoded(model, tokens):
    """Mean loss of each text read one token at a time, and the cache after all."""
    cache, logits = DynamicCache(config=model.config), []
    for token in tokens.split(1, dim=1):
        out = model(token, past_key_values=cache)
        cache, _ = out.past_key_values, logits.append(out.logits[:, -1].double())
    losses = torch.nn.functional.cross_entropy(
        torch.stack(logits[:-1], 1).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(tokens), -1).mean(1), cache
