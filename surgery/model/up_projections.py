"""Matrices that rebuild the keys, or the values, of a layer from its latents.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Mapping

import torch
from torch import nn


class UpProjections(nn.Module):
    """One matrix for each block of latents, a parameter that is named by the block's number.

    The matrices are read where this module is called, and nowhere else in a forward pass. So whatever hooks into the
    call (offloading, sharding, adapters of parameters) sees them.
    """

    def __init__(self, shapes: Mapping[int, tuple[int, int]]):
        """
        Args:
            shapes: rows and latents of each block's matrix; blocks without rows have none.
        """
        super().__init__()
        for number, shape in shapes.items():
            self.register_parameter(str(number), nn.Parameter(torch.empty(shape)))
        self.numbers = tuple(shapes)

    def matrix(self, number: int) -> torch.Tensor:
        """A block's matrix [rows, latents]."""
        return getattr(self, str(number))  # adapters exchange the parameter for a property

    def matrices(self) -> dict[int, torch.Tensor]:
        """All matrices by the number of their block."""
        return {number: self.matrix(number) for number in self.numbers}

    def forward(self, latents: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Latents [B, S, ·] of some blocks, each through its matrix → rows of all these blocks [B, S, rows]."""
        blocks = [number for number in latents if number in self.numbers]
        rows = [nn.functional.linear(latents[number], self.matrix(number)) for number in blocks]
        return torch.cat(rows, dim=-1) if len(rows) > 1 else rows[0]
