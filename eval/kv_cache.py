"""Bytes of a model's KV cache: counted in a live cache object, never computed from a config."""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import LongTensor, nn

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.eval.tensor_bytes import plain_tensors, storage_bytes
from surgery.model.cache_argument import cache_for, returned_cache

GROWTH_STEPS = 64
"""Decoded tokens over which the growth of a cache is taken: a quantized cache may pack 32 or more tokens at a time."""


@dataclass(frozen=True)
class KVUse:
    """Contents of a model's live cache.

    Attributes:
        context: tokens of each sequence in the cache.
        batch: sequences.
        held_bytes: of the whole cache at exactly `context` tokens.
        bytes_per_token: `held_bytes` over all tokens of all sequences.
        growth_per_token: bytes by which one sequence's cache grew per token, over the last decoded tokens. It differs
            from `bytes_per_token` where some layers keep only a window, or old tokens take fewer bytes than new ones.
        dtype: of the model, as in "bfloat16".
    """

    context: int
    batch: int
    held_bytes: int
    bytes_per_token: float
    growth_per_token: float
    dtype: str


def cache_bytes(cache: Any) -> int:
    """Bytes of every tensor that a live cache holds.

    Keys, values and whatever else its layers keep (latents, quantized values and their scales, indexer keys, recurrent
    states) are found by walking the object, so that a cache class of anyone's is counted in full. Only integer scalars
    are left out: they are position counters. Tensors that share a storage are counted once, views of it by their own
    elements: a key expanded to many heads counts as one, the window of a sliding layer as its window.
    """
    tensors = plain_tensors(cache)
    return storage_bytes(tensor for tensor in tensors if tensor.ndim > 0 or tensor.is_floating_point())


@torch.no_grad()
def measure_kv(model: nn.Module, context: int, batch: int = 1) -> KVUse:
    """Fills the cache that a model makes for itself with `context` random tokens, and counts what it holds.

    All but the last 64 tokens are prefilled in one pass, and those are decoded one by one, so that what is counted is
    the cache of a model that generates. (With fewer than 65 tokens, the first one is prefilled.)

    Args:
        model: any causal model that returns its cache.
        context: tokens of each sequence, at least 2.
        batch: sequences.

    Raises:
        SurgeryError: the model returns no cache.
    """
    steps = min(GROWTH_STEPS, context - 1)
    tokens = random_tokens(model, batch, context)
    with evaluation_mode(model):
        _, past = forward_with_cache(model, tokens[:, :-steps], None)
        before = cache_bytes(past)
        for token in tokens[:, -steps:].split(1, dim=1):
            _, past = forward_with_cache(model, token, past)
    num_bytes = cache_bytes(past)
    growth = (num_bytes - before) / (steps * batch)
    return KVUse(context, batch, num_bytes, num_bytes / (context * batch), growth, dtype_name(model))


def random_tokens(model: nn.Module, batch: int, length: int, seed: int = 0) -> LongTensor:
    """Uniformly random token ids [batch, length], int64, where the model's inputs go; equal seeds give equal ones."""
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(embedding.shape[0], (batch, length), generator=generator).to(embedding.device)


def forward_with_cache(model: nn.Module, tokens: LongTensor, cache: Any) -> tuple[Any, Any]:
    """One pass over `tokens` [B, T] after what is cached (None: nothing yet), as `generate` does it.

    Only the last position's logits are made if the model can leave out the others: those of a long prompt can take more
    memory than all else.

    Returns:
        What the model returned, and the live cache in it.

    Raises:
        SurgeryError: the model returns no cache.
    """
    last = {"logits_to_keep": 1} if _takes_logits_to_keep(type(model)) else {}
    output = model(input_ids=tokens, use_cache=True, **cache_for(model, cache), **last)
    if (cache := returned_cache(output)) is None:
        raise SurgeryError(f"{type(model).__name__} returns no cache, even with use_cache=True: nothing to measure")
    return output, cache


def dtype_name(model: nn.Module) -> str:
    """The dtype of a model's floating-point parameters, as in "bfloat16"; where they differ, the one of most of them.

    Raises:
        SurgeryError: there are none.
    """
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    if not counts:
        raise SurgeryError(f"{type(model).__name__} has no floating-point parameters: its dtype cannot be told")
    return str(max(counts, key=counts.get)).removeprefix("torch.")


@cache
def _takes_logits_to_keep(model_class: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters
