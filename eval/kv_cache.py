"""How many bytes a model's KV cache really takes: counted in a live cache object, never computed from a config."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import DynamicLayer

from surgery.errors import SurgeryError
from surgery.eval.loss import evaluation_mode


def cache_bytes(past_key_values: Any) -> int:
    """Bytes of every tensor that a live cache holds.

    Keys, values and whatever else its layers keep (latents, quantised codes and their scales, indexer keys, recurrent
    states) are found by walking the object, so that a cache class of anyone's is counted in full. Only integer scalars
    are left out: they are position counters. Tensors that share a storage are counted once, views of it by their own
    elements: a key expanded to many heads counts as one, the window of a sliding layer as its window.
    """
    views: dict[tuple[torch.device, int], dict[tuple, int]] = {}
    limits: dict[tuple[torch.device, int], int] = {}
    for tensor in _tensors(past_key_values, set()):
        if tensor.ndim == 0 and not tensor.is_floating_point():
            continue
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        views.setdefault(key, {})[view] = tensor.numel() * tensor.element_size()
        limits[key] = storage.nbytes()
    return sum(min(limits[key], sum(held.values())) for key, held in views.items())


@torch.no_grad()
def kv_bytes_per_token(model: nn.Module, prompt_length: int = 64, steps: int = 8) -> float:
    """Bytes by which the cache of one sequence grows with every decoded token.

    Random tokens are prefilled and decoded, batch 1, with the cache that the model makes for itself (a `DynamicCache`
    for stock models). A layer with a sliding window counts until its window is full: choose a `prompt_length` beyond
    the window to see what is left then.

    Raises:
        SurgeryError: the arguments are not positive, the model returns no cache, or a cache of nothing but growing
            layers holds another number of bytes than its growth times its tokens.
    """
    if prompt_length < 1 or steps < 1:
        raise SurgeryError(f"cannot decode {steps} tokens after {prompt_length}: at least 1 of each is needed")
    tokens = _random_tokens(model, prompt_length + steps)
    with evaluation_mode(model):
        cache = _extend(model, tokens[:, :prompt_length], None)
        prefilled = cache_bytes(cache)
        for position in range(prompt_length, prompt_length + steps):
            cache = _extend(model, tokens[:, position : position + 1], cache)
    total = cache_bytes(cache)
    growth = (total - prefilled) / steps
    if _only_grows(cache) and total != growth * tokens.shape[1]:
        raise SurgeryError(
            f"the cache holds {total} bytes after {tokens.shape[1]} tokens but grows by {growth:g} per token: "
            "it keeps something that does not belong to a token"
        )
    return growth


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every plain tensor reachable from a cache through attributes and containers, but not through modules."""
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            yield value
            return
        # Quantised tensors of torchao and quanto own no storage: they wrap codes, scales and zero points.
        children = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
    for child in children:
        yield from _tensors(child, seen)


def _random_tokens(model: nn.Module, length: int) -> Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)


def _extend(model: nn.Module, tokens: Tensor, cache: Any) -> Any:
    cache = model(input_ids=tokens, past_key_values=cache, use_cache=True).past_key_values
    if cache is None:
        raise SurgeryError(f"{type(model).__name__} returns no cache, even with use_cache=True: nothing to measure")
    return cache


def _only_grows(cache: Any) -> bool:
    """Whether every layer keeps all tokens: no windows, no fixed buffers, no recurrent states."""
    layers = getattr(cache, "layers", None) or []
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
