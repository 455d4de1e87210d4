"""Selection of the attention function for training.

Fused kernels recompute attention weights from a rounded logsumexp, so their gradients lose accuracy where logits exceed
about 10^4. Trained models stay far below.
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
    """Set a model's attention function for training and return its name; None keeps the loaded one.

    Args:
        choice: "surgery" for this project's kernel, which takes any key and value head dims; "model" for the function
            that the model was loaded with; "auto" for `surgery.running.equal_widths` on a CPU, the model's on a GPU.

    Raises:
        SurgeryError: "surgery" for a model whose attention function cannot be set.
    """
    if choice == "model" or (choice == "auto" and device.type != "cpu"):
        return None
    if choice == "auto":
        return equal_widths.NAME if equal_widths.use_equal_widths(model) else None
    if not equal_widths.takes_attention_functions(model):
        raise SurgeryError(
            f"{type(model).__name__} does not support custom attention functions: set attention to model"
        )
    ALL_ATTENTION_FUNCTIONS.register(KERNEL, prefill_attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(KERNEL, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(KERNEL)
    return KERNEL
