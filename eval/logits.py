"""Logits of a causal language model, computed a few positions at a time to bound memory.

The fp32 logits of 8k positions over a vocabulary of 128k take 4 GB, more than the weights of many models.
`LogitReader` therefore stores hidden states and applies the LM head to a few positions at a time.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import LongTensor, Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.model.cache_argument import cache_for, returned_cache

ROWS_AT_ONCE = 512
"""Positions of a batch whose fp32 logits are materialized at once: 256 MB for a vocabulary of 128k."""


class LogitReader:
    """Reader of a causal model's logits at selected positions, a few at a time.

    For models that are a decoder followed by a linear LM head, only hidden states are stored. Other models process
    the logits further (softcap, scale) or have no separate head. The config does not tell, so the split is tried on a
    few tokens and used only if its logits equal the model's bit for bit. Otherwise the model's logits are stored in
    its dtype, and only the conversion to fp32 is done a few positions at a time.
    """

    def __init__(self, model: nn.Module, tokens: LongTensor) -> None:
        """Try the split into decoder and head on the first few of `tokens` [N, T]."""
        self._model = model
        # Offloaded weights are on the meta device; the hooks that load them for each pass move the inputs too.
        devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        self._device = next(devices, tokens.device)
        self._body, self._head = _body_and_head(model)
        if not self._split_is_exact(tokens[:1, :8]):
            self._body = self._head = None

    @property
    def splits(self) -> bool:
        """True if hidden states are stored instead of logits."""
        return self._head is not None

    def states(self, tokens: LongTensor) -> Tensor:
        """Run the model on `tokens` [B, T] and return states [B, T, hidden size or vocabulary] in the model's dtype."""
        module = self._body if self.splits else self._model
        output = module(input_ids=tokens.to(self._device), use_cache=False)
        return output.last_hidden_state if self.splits else output.logits

    def extend(self, tokens: LongTensor, cache: Any) -> tuple[Tensor, Any]:
        """Run the model on `tokens` [B, T] that follow those in `cache`; return states as in `states`, and the cache.

        Raises SurgeryError: the model returns no cache.
        """
        module = self._body if self.splits else self._model
        output = module(input_ids=tokens.to(self._device), use_cache=True, **cache_for(module, cache))
        if (cache := returned_cache(output)) is None:
            raise SurgeryError(f"{type(self._model).__name__} returns no KV cache, which decoding needs")
        return output.last_hidden_state if self.splits else output.logits, cache

    def frozen_head(self) -> nn.Module | None:
        """Copy the LM head, to compute logits after the model is freed; None if states are logits."""
        return copy.deepcopy(self._head).requires_grad_(False) if self.splits else None

    def logits(self, states: Tensor) -> Tensor:
        """Compute fp32 logits [B, n, vocabulary] from states [B, n, ...] at any n positions."""
        return (self._head(states) if self.splits else states).float()

    def _split_is_exact(self, tokens: LongTensor) -> bool:
        if not self.splits:
            return False
        tokens = tokens.to(self._device)
        expected = self._model(input_ids=tokens, use_cache=False).logits
        try:
            logits = self._head(self._body(input_ids=tokens, use_cache=False).last_hidden_state)
        except Exception:  # a body that cannot be called alone for any reason: fall back to the whole model
            return False
        # No tolerance: a softcap of 30 leaves small logits almost unchanged, but not large ones.
        return torch.equal(logits, expected)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode and restore the training flag of each module on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _body_and_head(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    body = getattr(model, "base_model", None)
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    if body is None or body is model or head is None:
        return None, None
    return body, head
