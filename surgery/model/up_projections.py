"""Up-projections that rebuild the keys, or the values, of a layer from its latents.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Mapping

import torch
from torch import nn


class UpProjections(nn.Module):
    """One matrix per block of latents, a parameter named by the index of the block.

    In a forward pass the matrices are read only by a call of this module, so that hooks (offloading, sharding, adapters
    of parameters) work.
    """

    def __init__(self, shapes: Mapping[int, tuple[int, int]]):
        """
        Args:
            shapes: output rows and latent elements of each block's matrix, by block index; blocks may be missing.
        """
        super().__init__()
        for number, shape in shapes.items():
            self.register_parameter(str(number), nn.Parameter(torch.empty(shape)))
        self.numbers = tuple(shapes)

    def matrix(self, number: int) -> torch.Tensor:
        """Return a block's matrix [rows, latent elements]."""
        return getattr(self, str(number))  # not `_parameters`: adapters replace the parameter by a property

    def matrices(self) -> dict[int, torch.Tensor]:
        """Return all matrices by block index."""
        return {number: self.matrix(number) for number in self.numbers}

    def forward(self, latents: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Multiply the latents [B, S, ·] of each block by its matrix; return the concatenated rows [B, S, rows]."""
        blocks = [number for number in latents if number in self.numbers]
        rows = [nn.functional.linear(latents[number], self.matrix(number)) for number in blocks]
        return torch.cat(rows, dim=-1) if len(rows) > 1 else rows[0]
