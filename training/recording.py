"""Recording of the outputs of a causal model's layers while it runs; the model may be wrapped.

Hooks on the decoder's layers do it, so that stock and custom model classes are alike, and the model's code is left
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.common.errors import SurgeryError


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder of a causal model: the module whose `layers` each have attention (`attention_of`).

    Looks through what accelerate, DDP, DeepSpeed, torch.compile and PEFT put around a model.

    Raises:
        SurgeryError: there is none.
    """
    decoder = model
    for name in ("module", "_orig_mod", "module", "_orig_mod"):  # a compiled model in DDP, or the reverse
        inner = getattr(decoder, name, None)
        decoder = inner if isinstance(inner, nn.Module) else decoder
    if hasattr(decoder, "get_base_model"):  # PEFT
        decoder = decoder.get_base_model()
    if hasattr(decoder, "get_decoder"):
        decoder = decoder.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not layers or not all(attention_of(layer) is not None for layer in layers):
        raise SurgeryError(f"{type(model).__name__}: has no layers with a self_attn whose outputs could be matched")
    return decoder


class Recording:
    """The tensors of a decoder's last forward pass; its graph too, if gradients were enabled.

    Attributes:
        count: L, the number of layers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pieces: dict[str, list[list[Tensor]]] = {}
        self._running = False

    @property
    def hidden(self) -> list[Tensor]:
        """Outputs of each layer, [B, T, D] of each."""
        return self._joined("hidden")

    @property
    def attention(self) -> list[Tensor]:
        """Outputs of each attention to the residual stream, [B, T, D] of each."""
        return self._joined("attention")

    @property
    def inputs(self) -> list[Tensor]:
        """Inputs of each attention: normalized hidden states, [B, T, D] of each."""
        return self._joined("inputs")

    def _joined(self, kind: str) -> list[Tensor]:
        pieces = self._pieces.get(kind)
        if not pieces or not all(pieces):
            raise SurgeryError(f"nothing was recorded of the layers' {kind}: run the model first, and ask for it")
        # A decoder may take a text in pieces (a cache that layers share); almost always there is one.
        return [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in pieces]

    def _start(self) -> None:
        self._running = True
        for kind in self._pieces:
            self._pieces[kind] = [[] for _ in range(self.count)]

    def seen(self, layer: int) -> int:
        """Tokens of this pass that are recorded already."""
        return sum(piece.shape[1] for piece in self._pieces["attention"][layer])

    def _add(self, kind: str, layer: int, tensor: Tensor) -> None:
        # Layers that run outside of the decoder's own pass do so in the backward pass, which computes them again.
        if self._running:
            self._pieces[kind][layer].append(tensor)


@contextmanager
def recorded(
    model: nn.Module, *, hidden: bool = False, attention: bool = False, inputs: bool = False
) -> Iterator[Recording]:
    """Records each forward pass of ``model``, in place of the one before, for the length of a ``with`` block.

    The block may hold one pass or a whole training; a model to be compiled is compiled inside of it. The recorded
    tensors carry gradients where the pass did, under gradient checkpointing too if that is not reentrant, and stay
    usable after the block. They are not detached or copied: they live as long as the recording or the next pass.

    Args:
        hidden, attention, inputs: which of `Recording`'s lists to fill.

    Raises:
        SurgeryError: the model has no such layers, or (while it runs) gradients are checkpointed reentrantly.
    """
    decoder = decoder_of(model)
    record = Recording(len(decoder.layers))
    record._pieces = {
        kind: [] for kind, enabled in (("hidden", hidden), ("attention", attention), ("inputs", inputs)) if enabled
    }
    grad_enabled = False

    def start(module: nn.Module, args: tuple) -> None:
        nonlocal grad_enabled
        grad_enabled = torch.is_grad_enabled()
        record._start()

    def stop(module: nn.Module, args: tuple, output: Any) -> None:
        record._running = False

    def taker(kind: str, layer: int) -> Callable[..., None]:
        def take(module: nn.Module, args: tuple, output: Any) -> None:
            if record._running and grad_enabled and not torch.is_grad_enabled():
                raise SurgeryError(
                    "outputs of layers cannot be matched under reentrant gradient checkpointing: pass"
                    ' gradient_checkpointing_kwargs={"use_reentrant": False}'
                )
            record._add(kind, layer, first(output))

        return take

    def take_input(layer: int) -> Callable[..., None]:
        def take(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            record._add("inputs", layer, args[0] if args else kwargs["hidden_states"])

        return take

    with ExitStack() as stack:
        # always_call: a pass that fails must not leave the recording running.
        hooks = [
            decoder.register_forward_pre_hook(start),
            decoder.register_forward_hook(stop, always_call=True),
        ]
        for index, layer in enumerate(decoder.layers):
            if hidden:
                hooks.append(layer.register_forward_hook(taker("hidden", index)))
            if attention:
                hooks.append(attention_of(layer).register_forward_hook(taker("attention", index)))
            if inputs:
                hooks.append(attention_of(layer).register_forward_pre_hook(take_input(index), with_kwargs=True))
        for hook in hooks:
            stack.callback(hook.remove)
        yield record


def attention_of(layer: nn.Module) -> nn.Module | None:
    """Return the token mixer of a decoder layer: its attention, or linear attention instead; None if it has neither."""
    candidates = (getattr(layer, name, None) for name in ("self_attn", "linear_attn", "mamba"))
    return next((module for module in candidates if module is not None), None)


def first(output: Any) -> Tensor:
    """The hidden states in what a layer or an attention returned."""
    return output[0] if isinstance(output, tuple | list) else output


def same_layers(student: nn.Module, teacher: Sequence[Tensor]) -> None:
    """Raises SurgeryError unless a student has as many layers as the teacher's tensors come from."""
    count = len(decoder_of(student).layers)
    if count != len(teacher):
        raise SurgeryError(f"the student has {count} layers, its teacher {len(teacher)}: they cannot be matched")
