"""MLA attention with PyTorch's fused CPU kernels.

Keys and values of MLA differ in width, but the fused CPU kernels require equal widths; otherwise PyTorch materializes
all attention weights, several times slower. Values are therefore padded with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import pad

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "surgery_equal_widths"


def equal_widths_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run transformers' SDPA: query [B, H, T, e], key [B, K, S, e], value [B, K, S, v] → ([B, T, H, v], None)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing > 0 and query.shape[2] > 1:  # for a decode step, padding would copy the whole cache
        value = pad(value, (0, missing))
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return out[..., :width], None


def use_equal_widths(model: PreTrainedModel) -> bool:
    """Switch a model to `equal_widths_attention`; return False if it does not support attention functions."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not getattr(model, "_supports_attention_backend", False) or model.config._attn_implementation != "sdpa":
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, equal_widths_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    return True
