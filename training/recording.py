"""Recording of layer inputs and outputs of a causal LM with forward hooks.

Hooks on the decoder layers work for stock and custom model classes, without changes to their code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.common.errors import SurgeryError


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the decoder of a causal LM: the module whose `layers` each have a token mixer (`attention_of`).

    Raises SurgeryError: the model has no such decoder.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(decoder, "layers", None)
    if not layers or not all(attention_of(layer) is not None for layer in layers):
        raise SurgeryError(
            f"{type(model).__name__}: layers without self_attn are not supported; set layer objectives to 0"
        )
    return decoder


class Recording:
    """Tensors [B, T, D] of a decoder's last forward pass by layer, with the autograd graph if gradients were enabled.

    A decoder with a cache that layers share may process a text in pieces; usually there is one piece.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self.running = layers, False
        self.pieces: dict[str, list[list[Tensor]]] = {}

    @property
    def hidden(self) -> list[Tensor]:
        """Outputs of the layers."""
        return self._joined("hidden")

    @property
    def attention(self) -> list[Tensor]:
        """Outputs of the attention modules to the residual stream."""
        return self._joined("attention")

    @property
    def inputs(self) -> list[Tensor]:
        """Inputs of the attention modules: normalized hidden states."""
        return self._joined("inputs")

    def start(self) -> None:
        """Discard the last forward pass and record the next one."""
        self.running = True
        self.pieces = {kind: [[] for _ in range(self._layers)] for kind in ("hidden", "attention", "inputs")}

    def seen(self, layer: int) -> int:
        """Return the number of tokens whose attention output is recorded so far in this forward pass."""
        return sum(piece.shape[1] for piece in self.pieces["attention"][layer])

    def add(self, kind: str, layer: int, tensor: Tensor) -> None:
        """Record a tensor, unless gradient checkpointing recomputes the layer outside the decoder's forward pass."""
        if self.running:
            self.pieces[kind][layer].append(tensor)

    def _joined(self, kind: str) -> list[Tensor]:
        return [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in self.pieces[kind]]


@contextmanager
def recorded(
    model: nn.Module, *, hidden: bool = False, attention: bool = False, inputs: bool = False
) -> Iterator[Recording]:
    """Record each forward pass of ``model`` in a ``with`` block; a pass replaces the recording of the one before.

    Recorded tensors are part of the autograd graph if the pass has gradients, also under non-reentrant gradient
    checkpointing. They are neither detached nor copied. Raises SurgeryError: the model has no such layers.
    """
    decoder = decoder_of(model)
    record = Recording(len(decoder.layers))

    def start(*_: Any) -> None:
        record.start()

    def stop(*_: Any) -> None:
        record.running = False

    def taker(kind: str, layer: int) -> Callable[..., None]:
        return lambda module, args, output: record.add(kind, layer, first(output))

    def input_taker(layer: int) -> Callable[..., None]:
        return lambda module, args, kwargs: record.add("inputs", layer, args[0] if args else kwargs["hidden_states"])

    with ExitStack() as stack:
        hooks = [decoder.register_forward_pre_hook(start), decoder.register_forward_hook(stop)]
        for index, layer in enumerate(decoder.layers):
            if hidden:
                hooks.append(layer.register_forward_hook(taker("hidden", index)))
            if attention:
                hooks.append(attention_of(layer).register_forward_hook(taker("attention", index)))
            if inputs:
                hooks.append(attention_of(layer).register_forward_pre_hook(input_taker(index), with_kwargs=True))
        for hook in hooks:
            stack.callback(hook.remove)
        yield record


def attention_of(layer: nn.Module) -> nn.Module | None:
    """Return the token mixer of a decoder layer: attention, linear attention or Mamba; None if it has none."""
    candidates = (getattr(layer, name, None) for name in ("self_attn", "linear_attn", "mamba"))
    return next((module for module in candidates if module is not None), None)


def first(output: Any) -> Tensor:
    """Return the hidden states from the output, possibly a tuple, of a layer or an attention."""
    return output[0] if isinstance(output, tuple | list) else output
