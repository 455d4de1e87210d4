"""Lets a function stand in for the attention of a loaded model: see queries, keys and masks, change what comes out.

transformers looks attention up by name in every forward pass, in the stock classes and in the project's own alike. What
is registered here under a name of its own hands each call to the function of the model's tap, whatever the family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import BoolTensor, Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from surgery.common.errors import SurgeryError
from surgery.families.softmax import Softmax

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
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: BoolTensor | None
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.key.shape[1]

    @property
    def softmax(self) -> Softmax:
        """How products of queries and keys become weights."""
        return Softmax(self.scaling, self.softcap, self.sinks)

    def visible(self) -> BoolTensor:
        """The mask, spelled out where it is causal: [B or 1, 1, T, S]."""
        if self.mask is not None:
            return self.mask
        queries, keys = self.query.shape[2], self.key.shape[2]
        everything = torch.ones(queries, keys, dtype=torch.bool, device=self.query.device)
        return everything.tril(keys - queries)[None, None]

    def of_heads(self, start: int, stop: int) -> AttentionCall:
        """The same call for KV heads ``start`` to ``stop`` - 1 and their query heads."""
        group = self.query.shape[1] // self.kv_heads
        queries = slice(start * group, stop * group)
        return replace(
            self,
            query=self.query[:, queries],
            key=self.key[:, start:stop],
            value=self.value[:, start:stop],
            sinks=None if self.sinks is None else self.sinks[queries],
        )

    def output(self) -> Tensor:
        """What attention gives, [B, T, H, v]."""
        return self.softmax.mix(self.query, self.key, self.value, self.mask).transpose(1, 2)


AttentionFunction = Callable[[AttentionCall], Tensor]
"""Gives the output [B, T, H, v] of a call; `AttentionCall.output` is attention as it is."""


@contextmanager
def tapped(model: PreTrainedModel, function: AttentionFunction) -> Iterator[None]:
    """Has ``function`` compute every attention of ``model`` for the length of a ``with`` block.

    It is called again where gradient checkpointing computes a layer again. Dropout is left out.

    Raises:
        SurgeryError: the model takes no attention function.
    """
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
    try:
        yield
    finally:
        for attention in attentions:
            del attention.surgery_tap
        for config, implementation in before:  # those of models inside of others come later, and have the last word
            config._attn_implementation = implementation


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


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
