"""Pairs of a head's channels that rotate together, found in the weights of an MLA layer.

Queries are rotated in the latent space. Keys of heads can be rotated in theirs, with the same scores, where `query_up`
commutes with the rotation: where it takes each pair of a head's channels, as a complex number, to component pairs of
one frequency by complex factors. Conversions write such weights; weights that were trained freely are not.

Shapes: H query heads, d head_dim, v its width in values, r kv_lora_rank, ρ width of the shared RoPE key.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeadPairs(NamedTuple):
    """Order of the channels of a layer's heads by their pairs.

    Attributes:
        channels: of a head [d]: pairs that rotate first, real and imaginary, then the others.
        pairs: component pair [p] whose frequency each pair of channels has.
        heads: K, those of the source's keys and values, or H where query heads have weights of their own.
    """

    channels: Tensor
    pairs: Tensor
    heads: int

    @classmethod
    def of(cls, query_up: Tensor, value_up: Tensor, groups: int, turns: list) -> HeadPairs | None:
        """Make them of query_up [H, d, r + ρ] and value_up [H, v, r]; None where keys cannot be rotated as heads.

        Reads the weights on the host.

        Args:
            groups: KV heads of the source. Their query heads share keys and values unless training set them apart.
            turns: of each of the ρ/2 component pairs, what decides its rotation; equal ones turn alike.
        """
        factors = torch.view_as_complex(
            query_up[..., value_up.shape[-1] :].detach().cpu().float().unflatten(-1, (-1, 2)).contiguous()
        )  # [H, d, ρ/2]
        links = (factors != 0).any(dim=0)
        real, imaginary, pairs = [], [], []
        partners: dict[tuple[int, ...], list[int]] = {}
        for channel, row in enumerate(links):
            partners.setdefault(tuple(row.nonzero().flatten().tolist()), []).append(channel)
        still = partners.pop((), [])
        if (links.sum(dim=0) > 2).any():
            return None
        for components, channels in partners.items():
            if len(channels) != 2 or any(turns[each] != turns[components[0]] for each in components):
                return None
            first, second = channels
            if torch.equal(factors[:, second], 1j * factors[:, first]):
                real, imaginary = [*real, first], [*imaginary, second]
            elif torch.equal(factors[:, first], 1j * factors[:, second]):
                real, imaginary = [*real, second], [*imaginary, first]
            else:
                return None
            pairs.append(components[0])
        order = [channel for pair in zip(real, imaginary, strict=True) for channel in pair] + still
        by_group = [weight.detach().unflatten(0, (groups, -1)) for weight in (query_up, value_up)]
        shared = all(torch.equal(weight, weight[:, :1].expand_as(weight)) for weight in by_group)
        channels, pairs = (torch.tensor(each, dtype=torch.long, device=query_up.device) for each in (order, pairs))
        return cls(channels, pairs, groups if shared else len(query_up))
