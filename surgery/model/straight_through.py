"""Reading through quantization while a model trains, with gradients as if there were none.

Attention gets what the quantized cache would give it, and the gradient of what it got goes to the exact numbers as it
is: straight through (Bengio et al., arXiv:1308.3432). LLM-QAT (Liu et al., arXiv:2305.17888) so trains with a quantized
KV cache, by distillation from the source. No gradient is masked, also where codes clip, which they do to few numbers;
and none goes through scales and zero points, so training cannot learn to use what a scale tells of later tokens.

A pass reads what the same pass in evaluation mode reads, bit for bit: whole groups quantized at every position, the
last tokens exact. See `quantized_cache` for where that is not what decoding reads.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .plain_cache import PlainLayer
from .quantized_cache import QuantizedKVLayer
from .token_codes import TokenCodes


def straight_through(exact: Tensor, read: Tensor) -> Tensor:
    """The numbers of `read`, whose gradient goes to `exact` of the same shape."""
    return read.detach() + (exact - exact.detach())


class StraightThroughLayer(PlainLayer):
    """The cache of one layer that keeps all tokens exactly, and gives them as a quantized layer would."""

    form = "keys and values that are read as if quantized"
    reads_ahead = True

    def __init__(self, quantized: QuantizedKVLayer) -> None:
        """Take the format of an empty layer."""
        super().__init__()
        self.quantized = quantized

    def settings(self) -> tuple:
        """Return the settings of the quantized layer."""
        return self.quantized.settings()

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, H, n, d] and returns those of all tokens [B, H, T, d], dequantized."""
        keys, values = super().update(key_states, value_states)
        with torch.no_grad():
            read_keys, read_values = self.quantized.update(keys, values)
        # Groups count from the first token, so codes computed again with the next tokens are the same.
        self.quantized.reset()
        return straight_through(keys, read_keys), straight_through(values, read_values)


class StraightThroughCodes(TokenCodes):
    """Codes of streaming tokens that are the numbers themselves, as the codes would have them."""

    def __init__(self, codes: TokenCodes) -> None:
        """Take the format of `codes`."""
        super().__init__(*codes.settings())

    def settings(self) -> tuple:
        """Format, group, and what sets these apart from codes in bytes."""
        return *super().settings(), "straight-through"

    def token_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of one token of `width` channels of `dtype`: it is kept whole."""
        return width * dtype.itemsize

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, H, n, d] as they will be read, in their dtype, and no numbers beside them."""
        with torch.no_grad():
            read = super().decode(*super().encode(tokens), tokens.shape[-1])
        return straight_through(tokens, read), tokens[..., :0]

    def decode(self, codes: Tensor, numbers: Tensor, width: int) -> Tensor:
        """Return what `encode` was given."""
        return codes
