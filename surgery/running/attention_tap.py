"""Hook that replaces the attention function of a loaded model, to observe queries, keys and masks or change outputs.

transformers looks up the attention function by name in every forward pass, in stock and custom model classes. The
function registered here passes each call to the model's tap, whatever the family.
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
    """Arguments of a call of a layer's attention function.

    Attributes:
        query: [B, H, T, d] after RoPE; query heads of one KV head are adjacent.
        key, value: [B, G, S, d] and [B, G, S, v], cached tokens followed by new ones.
        mask: keys visible to each query, bool [B or 1, 1, T, S]; None for causal attention with T = S.
        scaling, softcap, sinks: as in :class:`surgery.families.softmax.Softmax`.
        positions: positions [T] of the queries among the keys; None for the last T.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: BoolTensor | None
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    positions: LongTensor | None = None

    @property
    def kv_heads(self) -> int:
        """Number of KV heads, G."""
        return self.key.shape[1]

    @property
    def softmax(self) -> Softmax:
        """Softmax with the scaling, softcap and sinks of this call."""
        return Softmax(self.scaling, self.softcap, self.sinks)

    def visible(self) -> BoolTensor:
        """Return the mask [B or 1, 1, T, S], materialized if it is causal."""
        if self.mask is not None:
            return self.mask
        queries, keys = self.query.shape[2], self.key.shape[2]
        everything = torch.ones(queries, keys, dtype=torch.bool, device=self.query.device)
        return everything.tril(keys - queries)[None, None]

    def of_heads(self, start: int, stop: int) -> AttentionCall:
        """Select KV heads [start, stop) and their query heads."""
        group = self.query.shape[1] // self.kv_heads
        queries = slice(start * group, stop * group)
        return replace(
            self,
            query=self.query[:, queries],
            key=self.key[:, start:stop],
            value=self.value[:, start:stop],
            sinks=None if self.sinks is None else self.sinks[queries],
        )

    def at(self, positions: LongTensor) -> AttentionCall:
        """Select the queries at given positions; requires T = S."""
        positions = positions.to(self.query.device)
        if self.mask is None:
            mask = (torch.arange(self.key.shape[2], device=positions.device) <= positions[:, None])[None, None]
        else:
            mask = self.mask[:, :, positions]
        return replace(self, query=self.query[:, :, positions], mask=mask, positions=positions)

    def output(self) -> Tensor:
        """Return the attention output, [B, T, H, v]."""
        return self.softmax.mix(self.query, self.key, self.value, self.mask).transpose(1, 2)


AttentionFunction = Callable[[AttentionCall], Tensor]
"""Function that returns the output [B, T, H, v] of a call; `AttentionCall.output` is the original attention."""


@contextmanager
def tap_attention(
    model: PreTrainedModel, function: AttentionFunction, positions: LongTensor | None = None
) -> Iterator[None]:
    """Let ``function`` compute the attention of all layers of ``model`` in a ``with`` block.

    Gradient checkpointing calls it again on recomputation. Dropout is omitted. With ``positions``, in calls with T = S,
    the last layer computes the outputs of only these. Raises SurgeryError: the model does not support attention
    functions.
    """
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    try:
        before = [(config, config._attn_implementation) for config in configs.values()]
        attentions = [layer.self_attn for layer in model.base_model.layers]
        if None in attentions:  # Mamba layers of Granite 4
            raise ValueError("some layers have no attention")
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise SurgeryError(f"{type(model).__name__} does not support custom attention functions ({error})") from None
    # transformers 5.19 updates a nested model with another config class only once.
    model.base_model.config._attn_implementation = NAME
    for attention in attentions:
        attention.config._attn_implementation = NAME
        attention.surgery_tap = function
    hooks = []
    if positions is not None:
        attentions[-1].surgery_tap = partial(_output_at_positions, function, positions)
        hooks = _restrict_to_positions(getattr(model.base_model.layers[-1], "mlp", None), positions)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for attention in attentions:
            del attention.surgery_tap
        for config, implementation in before:  # nested configs come later and override
            config._attn_implementation = implementation


def _output_at_positions(function: AttentionFunction, positions: LongTensor, call: AttentionCall) -> Tensor:
    return _scatter(function(call.at(positions)), positions, call.query.shape[2])


def _restrict_to_positions(module: nn.Module | None, positions: LongTensor) -> list[RemovableHandle]:
    """Restrict a per-token module [B, T, D] to given positions; outputs elsewhere are zero."""
    if module is None:
        return []
    length = 0

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal length
        length = args[0].shape[1]
        return args[0][:, positions.to(args[0].device)], *args[1:]

    def spread(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple) -> Tensor | tuple:
        if isinstance(output, tuple):  # gpt-oss also returns router scores
            return _scatter(output[0], positions, length), *output[1:]
        return _scatter(output, positions, length)

    return [module.register_forward_pre_hook(pick), module.register_forward_hook(spread)]


def _scatter(output: Tensor, positions: LongTensor, length: int) -> Tensor:
    """Scatter [B, n, ...] to its positions in [B, length, ...], zero elsewhere."""
    everywhere = output.new_zeros(len(output), length, *output.shape[2:])
    return everywhere.index_copy(1, positions.to(output.device), output)


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
