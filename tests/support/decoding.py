"""Logits of a text that comes in pieces through a cache, or after padding: both are those of one pass over it."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel


def in_pieces(model: PreTrainedModel, tokens: Tensor, sizes: tuple[int, ...] = (11, 7, 5, 1)) -> tuple[Tensor, Cache]:
    """Logits of tokens [B, T], read in pieces of these sizes, and the cache after them."""
    cache = DynamicCache(config=model.config)
    pieces = [model(piece, past_key_values=cache).logits for piece in tokens.split(sizes, dim=1)]
    return torch.cat(pieces, dim=1), cache


def after_padding(model: PreTrainedModel, tokens: Tensor, count: int = 5, *, numbered: bool = True, **how) -> Tensor:
    """Logits of tokens [B, T] after padding of some tokens; `numbered`: their positions are told."""
    padded = torch.cat([torch.full((len(tokens), count), 2), tokens], dim=1)
    mask = (torch.arange(padded.shape[1]) >= count).long().expand_as(padded)
    if numbered:
        how["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    return model(padded, attention_mask=mask, **how).logits[:, count:]
