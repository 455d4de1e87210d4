"""The attention function that models train with.

Where logits pass some 10^4, as no trained model's do, gradients of fused kernels lose their accuracy: they take weights
from the logarithm of a sum, rounded.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgery.common.errors import SurgeryError
from surgery.kernels.mla_prefill.attention_function import prefill_attention_function
from surgery.running import equal_widths

KERNEL = "surgery_prefill"


def use_attention(model: PreTrainedModel, choice: str, device: torch.device) -> str | None:
    """Let a model train with another attention function than it was loaded with; return its name, None for the model's
    own.

    Args:
        choice: "surgery" for the project's kernel, which takes keys and values of any widths, "model" for what the
            model was loaded with, or "auto": on a CPU `surgery.running.equal_widths`, on a GPU the model's own.

    Raises:
        SurgeryError: "surgery" for a model that takes no attention functions.
    """
    if choice == "model" or (choice == "auto" and device.type != "cpu"):
        return None
    if choice == "auto":
        return equal_widths.NAME if equal_widths.use_equal_widths(model) else None
    if not equal_widths.takes_attention_functions(model):
        raise SurgeryError(f"{type(model).__name__} does not take attention functions: set attention to model")
    ALL_ATTENTION_FUNCTIONS.register(KERNEL, prefill_attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(KERNEL, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(KERNEL)
    return KERNEL
