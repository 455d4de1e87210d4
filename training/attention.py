"""The attention function that models train with.

Keys and values of MLA differ in width, and PyTorch's fused kernels for CPUs want one width: otherwise it computes and
keeps all attention weights. Zeros behind the narrower one change nothing but that. On a GPU the project's own kernel
takes any widths.

Where logits pass some 10^4, as no trained model's do, gradients of fused kernels lose their accuracy: they take weights
from the logarithm of a sum, rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgery.common.errors import SurgeryError
from surgery.kernels.mla_prefill.attention_function import prefill_attention_function


def equal_widths_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' SDPA attention: query [B, H, T, e], key [B, K, S, e], value [B, K, S, v] → [B, T, H, v], None."""
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing > 0:
        value = pad(value, (0, missing))
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return out[..., :width], None


FUNCTIONS = {"surgery_equal_widths": equal_widths_attention, "surgery_prefill": prefill_attention_function}


def use_attention(model: PreTrainedModel, choice: str, device: torch.device) -> str | None:
    """Has a model train with another attention function than it was loaded with; says which, None for its own.

    Args:
        choice: "surgery" for the project's kernel, "model" for what the model was loaded with, or "auto": on a CPU
            PyTorch's fused kernel for keys and values of any widths, on a GPU the model's own.

    Raises:
        SurgeryError: "surgery" for a model that takes no attention functions.
    """
    takes = getattr(model, "_supports_attention_backend", False) and model.config._attn_implementation == "sdpa"
    if choice == "surgery" and not takes:
        raise SurgeryError(f"{type(model).__name__} does not take attention functions: set attention to model")
    if not takes or choice == "model" or (choice == "auto" and device.type != "cpu"):
        return None
    name = "surgery_prefill" if choice == "surgery" else "surgery_equal_widths"
    ALL_ATTENTION_FUNCTIONS.register(name, FUNCTIONS[name])
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(name)
    return name
