"""Lets a function stand in for the attention of a loaded model: see queries, keys and masks, change what comes out.

transformers looks attention up by name in every forward pass, in the stock classes and in the project's own alike. What
is registered here under a name of its own hands each call to the function of the model's tap, whatever the family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import BoolTensor, LongTensor, Tensor, nn
from torch.utils.hooks import RemovableHandle

from surgery.common.errors import SurgeryError
from surgery.families.softmax import Softmax

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "surgery_tap"


@dataclass(frozen=True)
class AttentionCall:
    """One attention of one layer: what it was called with.

    Attributes:
        layer: its index in the model.
        query: [B, H, T, d], rotated; query heads of one KV head stand together.
        key, value: [B, G, S, d] and [B, G, S, v], the tokens of the cache and the new ones.
        mask: which keys each query sees, bool [B or 1, 1, T, S]; None for causal attention with T = S.
        scaling: factor of the scores before the softmax.
        softcap, sinks: as in :class:`surgery.families.softmax.Softmax`.
        places: of the queries among the keys, [T]; None where they are the last T.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: BoolTensor | None
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    places: LongTensor | None = None

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.key.shape[1]

    @property
    def softmax(self) -> Softmax:
        """Softmax: how products of queries and keys become weights."""
        return Softmax(self.scaling, self.softcap, self.sinks)

    def visible(self) -> BoolTensor:
        """The mask, spelled out where it is causal: [B or 1, 1, T, S]."""
        if self.mask is not None:
            return self.mask
        queries, keys = self.query.shape[2], self.key.shape[2]
        everything = torch.ones(queries, keys, dtype=torch.bool, device=self.query.device)
        return everything.tril(keys - queries)[None, None]

    def of_heads(self, start: int, stop: int) -> AttentionCall:
        """Return the same call for KV heads ``start`` to ``stop`` - 1 and their query heads."""
        group = self.query.shape[1] // self.kv_heads
        queries = slice(start * group, stop * group)
        return replace(
            self,
            query=self.query[:, queries],
            key=self.key[:, start:stop],
            value=self.value[:, start:stop],
            sinks=None if self.sinks is None else self.sinks[queries],
        )

    def at(self, places: LongTensor) -> AttentionCall:
        """Return the same call for the queries at some positions, of a call with T = S."""
        places = places.to(self.query.device)
        if self.mask is None:
            mask = (torch.arange(self.key.shape[2], device=places.device) <= places[:, None])[None, None]
        else:
            mask = self.mask[:, :, places]
        return replace(self, query=self.query[:, :, places], mask=mask, places=places)

    def output(self) -> Tensor:
        """Return the attention output, [B, T, H, v]."""
        return self.softmax.mix(self.query, self.key, self.value, self.mask).transpose(1, 2)


AttentionFunction = Callable[[AttentionCall], Tensor]
"""Gives the output [B, T, H, v] of a call; `AttentionCall.output` is unchanged attention."""


@contextmanager
def tapped(model: PreTrainedModel, function: AttentionFunction, places: LongTensor | None = None) -> Iterator[None]:
    """Let ``function`` compute every attention of ``model`` for the length of a ``with`` block.

    It is called again where gradient checkpointing computes a layer again. Dropout is left out.

    Args:
        places: of the tokens at which what the model puts out is read, in calls with T = S: the last layer computes
            nothing else. None for all.

    Raises:
        SurgeryError: the model takes no attention function.
    """
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        attentions = [layer.self_attn for layer in model.base_model.layers]
        if None in attentions:  # Granite 4's, where a layer keeps a state
            raise ValueError("not every layer attends")
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise SurgeryError(f"{type(model).__name__} takes no attention function of ours ({error})") from None
    # transformers 5.19 changes a model inside of another once only, where the two have configs of two classes.
    model.base_model.config._attn_implementation = NAME
    for attention in attentions:
        attention.config._attn_implementation = NAME
        attention.surgery_tap = function
    hooks = []
    if places is not None:
        attentions[-1].surgery_tap = partial(_at_places, function, places)
        hooks = _at_places_alone(getattr(model.base_model.layers[-1], "mlp", None), places)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for attention in attentions:
            del attention.surgery_tap
        for config, implementation in before:  # those of models inside of others come later, and have the last word
            config._attn_implementation = implementation


def _at_places(function: AttentionFunction, places: LongTensor, call: AttentionCall) -> Tensor:
    """The output of ``function`` for the queries at some places, zeros for the others."""
    return _spread(function(call.at(places)), places, call.query.shape[2])


def _at_places_alone(module: nn.Module | None, places: LongTensor) -> list[RemovableHandle]:
    """Restrict a module that takes tokens one by one, [B, T, D], to some positions; the others get zeros."""
    if module is None:
        return []
    length = 0

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal length
        length = args[0].shape[1]
        return args[0][:, places.to(args[0].device)], *args[1:]

    def spread(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple) -> Tensor | tuple:
        if isinstance(output, tuple):  # gpt-oss gives scores of its experts too
            return _spread(output[0], places, length), *output[1:]
        return _spread(output, places, length)

    return [module.register_forward_pre_hook(pick), module.register_forward_hook(spread)]


def _spread(output: Tensor, places: LongTensor, length: int) -> Tensor:
    """[B, n, ...] at their places among [B, length, ...], zeros elsewhere."""
    everywhere = output.new_zeros(len(output), length, *output.shape[2:])
    return everywhere.index_copy(1, places.to(output.device), output)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(module.layer_idx, query, key, value, attention_mask, scaling, softcap, s_aux)
    return module.surgery_tap(call).contiguous(), None
