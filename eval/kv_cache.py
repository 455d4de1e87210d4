"""Bytes of a model's KV cache, counted in a live cache object instead of computed from the config."""

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
"""Decode steps over which cache growth is averaged; quantized caches may pack 32 or more tokens at a time."""


@dataclass(frozen=True)
class KVUse:
    """Measured size of a model's live KV cache.

    Attributes:
        context: cached tokens per sequence.
        batch: number of sequences.
        held_bytes: bytes of the whole cache at exactly `context` tokens.
        bytes_per_token: `held_bytes` divided by the tokens of all sequences.
        growth_per_token: bytes added per token and sequence, averaged over the last decode steps. Differs from
            `bytes_per_token` if layers keep only a window, or if old tokens take fewer bytes than new ones.
        dtype: dtype of the model, such as "bfloat16".
    """

    context: int
    batch: int
    held_bytes: int
    bytes_per_token: float
    growth_per_token: float
    dtype: str


def cache_bytes(cache: Any) -> int:
    """Count the bytes of all tensors in a live cache.

    Keys, values and other state of the layers (latents, quantized values and their scales, indexer keys, recurrent
    states) are found by walking the object graph, so third-party cache classes are counted in full. Integer scalars
    are skipped: they are position counters. Tensors that share a storage are counted once, and views by their own
    elements: a key expanded over heads counts as one head, a slice of a larger buffer as the slice.
    """
    tensors = plain_tensors(cache)
    return storage_bytes(tensor for tensor in tensors if tensor.ndim > 0 or tensor.is_floating_point())


@torch.no_grad()
def measure_kv(model: nn.Module, context: int, batch: int = 1) -> KVUse:
    """Fill the model's default cache with `context` random tokens, at least 2, and count its bytes.

    All but the last 64 tokens are prefilled in one pass and those are decoded one by one, as in generation. For
    contexts below 65, only the first token is prefilled. Raises SurgeryError: the model returns no cache.
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
    """Draw uniformly random token ids [batch, length], int64, from `seed`, on the device of the model's inputs."""
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(embedding.shape[0], (batch, length), generator=generator).to(embedding.device)


def forward_with_cache(model: nn.Module, tokens: LongTensor, cache: Any) -> tuple[Any, Any]:
    """Run one forward pass over `tokens` [B, T] with the given cache, or with a new one for None, as `generate` does.

    Computes only the logits of the last position if the model supports `logits_to_keep`: the logits of a long prompt
    can take more memory than everything else. Returns the model's output and its live cache. Raises SurgeryError: the
    model returns no cache.
    """
    last = {"logits_to_keep": 1} if _takes_logits_to_keep(type(model)) else {}
    output = model(input_ids=tokens, use_cache=True, **cache_for(model, cache), **last)
    if (cache := returned_cache(output)) is None:
        raise SurgeryError(f"{type(model).__name__} returns no cache, even with use_cache=True: nothing to measure")
    return output, cache


def dtype_name(model: nn.Module) -> str:
    """Return the dtype of most floating-point parameter elements, such as "bfloat16".

    Raises SurgeryError: the model has no floating-point parameters.
    """
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    if not counts:
        raise SurgeryError(f"{type(model).__name__} has no floating-point parameters: its dtype is unknown")
    return str(max(counts, key=counts.get)).removeprefix("torch.")


@cache
def _takes_logits_to_keep(model_class: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters
