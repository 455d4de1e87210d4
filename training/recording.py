"""Recording of layer inputs and outputs of a causal LM, possibly wrapped, with forward hooks.

Hooks on the decoder layers work for stock and custom model classes, without changes to their code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.common.errors import SurgeryError


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the decoder of a causal LM, unwrapped: the module whose `layers` each have a token mixer (`attention_of`).

    Raises SurgeryError: the model has no such decoder.
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
        raise SurgeryError(
            f"{type(model).__name__}: layers without self_attn are not supported; set layer objectives to 0"
        )
    return decoder


class Recording:
    """Tensors of a decoder's last forward pass, with the autograd graph if gradients were enabled."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pieces: dict[str, list[list[Tensor]]] = {}
        self._running = False

    @property
    def hidden(self) -> list[Tensor]:
        """Outputs of the L layers, each [B, T, D]."""
        return self._joined("hidden")

    @property
    def attention(self) -> list[Tensor]:
        """Outputs of the L attention modules to the residual stream, each [B, T, D]."""
        return self._joined("attention")

    @property
    def inputs(self) -> list[Tensor]:
        """Inputs of the L attention modules: normalized hidden states, each [B, T, D]."""
        return self._joined("inputs")

    def _joined(self, kind: str) -> list[Tensor]:
        pieces = self._pieces.get(kind)
        if not pieces or not all(pieces):
            raise SurgeryError(f"no {kind} of layers is recorded: pass {kind}=True, and run the model first")
        # A decoder with a cache that layers share may process a text in pieces; usually there is one piece.
        return [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in pieces]

    def _start(self) -> None:
        self._running = True
        for kind in self._pieces:
            self._pieces[kind] = [[] for _ in range(self.count)]

    def seen(self, layer: int) -> int:
        """Return the number of tokens recorded so far in this forward pass."""
        return sum(piece.shape[1] for piece in self._pieces["attention"][layer])

    def _add(self, kind: str, layer: int, tensor: Tensor) -> None:
        # Layers that run outside the decoder's forward pass are recomputed by gradient checkpointing.
        if self._running:
            self._pieces[kind][layer].append(tensor)


@contextmanager
def recorded(
    model: nn.Module, *, hidden: bool = False, attention: bool = False, inputs: bool = False
) -> Iterator[Recording]:
    """Record each forward pass of ``model`` in a ``with`` block; a pass replaces the recording of the one before.

    Compile the model inside the block. Recorded tensors are part of the autograd graph if the pass has gradients, also
    under non-reentrant gradient checkpointing. They are neither detached nor copied. Raises SurgeryError: the model has
    no such layers, or (in the forward pass) gradient checkpointing is reentrant.
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
                    "layers cannot be recorded with reentrant gradient checkpointing: pass"
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
        hooks = [decoder.register_forward_pre_hook(start), decoder.register_forward_hook(stop, always_call=True)]
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
    """Return the token mixer of a decoder layer: attention, linear attention or Mamba; None if it has none."""
    candidates = (getattr(layer, name, None) for name in ("self_attn", "linear_attn", "mamba"))
    return next((module for module in candidates if module is not None), None)


def first(output: Any) -> Tensor:
    """Return the hidden states from the output, possibly a tuple, of a layer or an attention."""
    return output[0] if isinstance(output, tuple | list) else output


def same_layers(student: nn.Module, teacher: Sequence[Tensor]) -> None:
    """Raise SurgeryError if the student's number of layers differs from the number of the teacher's tensors."""
    count = len(decoder_of(student).layers)
    if count != len(teacher):
        raise SurgeryError(f"numbers of layers differ: student {count}, teacher {len(teacher)}; they must be equal")
