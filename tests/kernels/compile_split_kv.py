"""Launches of the merge, for `kernel_checks.compiled`."""

import torch

from surgery.kernels.launch import Launch
from surgery.kernels.split_kv import merge_launch


def launches() -> dict[str, Launch]:
    """Parts of MLA and of plain heads."""
    with torch.device("meta"):
        return {
            f"{splits} x {width}": merge_launch(
                torch.empty(64, splits, width),
                torch.empty(64, splits),
                torch.empty(64, width, dtype=torch.bfloat16),
                torch.empty(64),
            )
            for splits, width in ((4, 512), (128, 128), (8, 320))
        }
