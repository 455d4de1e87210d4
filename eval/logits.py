"""The logits of a causal language model on given sequences, without ever holding all of them in fp32.

The logits of 8k positions over a vocabulary of 128k take 4 GB in fp32, more than many models' weights. `LogitReader`
therefore keeps the hidden states of a batch and turns a few positions at a time into logits.
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
"""Positions, over a whole batch, whose fp32 logits exist at one time: 256 MB for a vocabulary of 128k."""


class LogitReader:
    """Reads the logits of a causal model at chosen positions, a few at a time.

    Most models are a body and a linear head, and then only hidden states are kept. Some do more after the head (a
    softcap, a scale), or have no such parts. Which it is cannot be told from a config, so the split is tried on a few
    tokens and used only if its logits equal the model's bit for bit. Otherwise the model's own logits, in its own
    dtype, are kept, and only their conversion to fp32 is done in parts.
    """

    def __init__(self, model: nn.Module, tokens: LongTensor) -> None:
        """`tokens` [N, T]: the first few are used to try the split."""
        self._model = model
        # Weights on the meta device are brought in for each pass, by hooks that move what the pass is given too.
        devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        self._device = next(devices, tokens.device)
        self._body, self._head = _body_and_head(model)
        if not self._split_is_exact(tokens[:1, :8]):
            self._body = self._head = None

    @property
    def splits(self) -> bool:
        """Return whether hidden states are stored instead of logits."""
        return self._head is not None

    def states(self, tokens: LongTensor) -> Tensor:
        """Runs the model on `tokens` [B, T]; returns its states [B, T, hidden size or vocabulary], model dtype."""
        module = self._body if self.splits else self._model
        output = module(input_ids=tokens.to(self._device), use_cache=False)
        return output.last_hidden_state if self.splits else output.logits

    def extend(self, tokens: LongTensor, cache: Any) -> tuple[Tensor, Any]:
        """Runs the model on `tokens` [B, T] after those in `cache` (None at the start).

        Returns:
            States as in `states`, and the live cache that the model made or went on with.

        Raises:
            SurgeryError: the model keeps no cache.
        """
        module = self._body if self.splits else self._model
        output = module(input_ids=tokens.to(self._device), use_cache=True, **cache_for(module, cache))
        if (cache := returned_cache(output)) is None:
            raise SurgeryError(f"{type(self._model).__name__} keeps no cache: nothing can be decoded through it")
        return output.last_hidden_state if self.splits else output.logits, cache

    def frozen_head(self) -> nn.Module | None:
        """A copy of the head, to make logits of states when the model has gone; None where states are logits."""
        return copy.deepcopy(self._head).requires_grad_(False) if self.splits else None

    def logits(self, states: Tensor) -> Tensor:
        """Logits [B, n, vocabulary] in fp32 of states [B, n, ...] at any n positions."""
        return (self._head(states) if self.splits else states).float()

    def _split_is_exact(self, tokens: LongTensor) -> bool:
        if not self.splits:
            return False
        tokens = tokens.to(self._device)
        expected = self._model(input_ids=tokens, use_cache=False).logits
        try:
            logits = self._head(self._body(input_ids=tokens, use_cache=False).last_hidden_state)
        except Exception:  # whatever stops an unusual body from being called alone, the whole model can be read instead
            return False
        # A tolerance would be wrong here: a softcap of 30 leaves small logits almost unchanged and large ones not.
        return torch.equal(logits, expected)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode, and exactly those of its modules that were training back afterwards."""
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
