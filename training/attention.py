"""Selection of the attention function for training.

Fused kernels recompute attention weights from a rounded logsumexp, so their gradients lose accuracy where logits exceed
about 10^4. Trained models stay far below.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from surgery.running import equal_widths


def use_attention(model: PreTrainedModel, choice: str, device: torch.device) -> str | None:
    """Set a model's attention function for training and return its name; None keeps the loaded one.

    Args:
        choice: "model" for the function that the model was loaded with; "auto" for `surgery.running.equal_widths` on a
            CPU, the model's on a GPU.
    """
    if choice == "model" or device.type != "cpu":
        return None
    return equal_widths.NAME if equal_widths.use_equal_widths(model) else None
