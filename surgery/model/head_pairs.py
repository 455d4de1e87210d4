"""Detection of the channel pairs of a head that rotate together, from the weights of an MLA layer.

Absorbed MLA rotates queries in the latent space. Expanded keys can be rotated per head with the same scores if
`query_up` commutes with the rotation: if it maps each pair of a head's channels, as a complex number, to component
pairs of one frequency by complex factors. Conversions write such weights; unconstrained training destroys the property.

Shapes: H query heads, d head_dim, v value head_dim, r kv_lora_rank, ρ width of the shared RoPE key.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeadPairs(NamedTuple):
    """Order of the channels of a layer's heads by rotary pairs.

    Attributes:
        channels: channel indices of a head [d]: rotating pairs first (real, imaginary), then channels without rotation.
        pairs: index [p] of a component pair with the frequency of each channel pair.
        heads: number of heads to expand: the source's KV heads, or H if query heads of a group have different weights.
    """

    channels: Tensor
    pairs: Tensor
    heads: int

    @classmethod
    def of(cls, query_up: Tensor, value_up: Tensor, rank: int, groups: int, turns: list) -> HeadPairs | None:
        """Detect the pairs in query_up [H, d, r + ρ] and value_up [H, v, ·]; None if keys cannot be rotated per head.

        Reads the weights on the host.

        Args:
            rank: r.
            groups: KV heads of the source. Query heads of a group share weights unless training has changed them.
            turns: frequency and position axis of each of the ρ/2 component pairs; equal ones rotate alike.
        """
        factors = torch.view_as_complex(
            query_up[..., rank:].detach().cpu().float().unflatten(-1, (-1, 2)).contiguous()
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
