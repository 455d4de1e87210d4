"""Nested ranks: one training of which every slice of the student is a good model (MatryoshkaKV, arXiv:2410.14731).

Conversions to latents leave them in the order of what they are worth, and a smaller checkpoint keeps the first so many
of every block. A plain healing looks at all of them only. Here every step draws how many count, and the others are
zero for that step: what runs is what a slice computes, and latents that were dropped get no gradient.

Nothing here knows methods: an attention says by `latent_slices` which outputs of its `kv_down` are latents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.training.recording import attention_of, decoder_of

ALIKE = 0.5
"""Share of the steps that cut all blocks to one share, as slices are; otherwise each block draws its own."""

MASK = "latent_mask"
"""Buffer of a down projection, in no checkpoint: 1 for an output that counts, 0 for one that does not."""


class NestedRanks:
    """Mask that zeroes the latents of a student beyond drawn ranks.

    The draw of a step follows from seed, step, layer and block alone: a resumed run draws what one without a stop does,
    and all processes and batches of a step draw alike. Outside of `drawn` and `cut` nothing is zero.

    Attributes:
        shares: of every block's latents that may be drawn.
    """

    def __init__(self, student: nn.Module, shares: Sequence[float], seed: int) -> None:
        """Mask a student as it trains, on its device, with whatever was put into it or around it.

        Raises:
            SurgeryError: a layer has no latents that can be cut.
        """
        self.shares, self._seed = tuple(shares), seed
        attentions = nested_attentions(student)
        self._downs = [attention.kv_down for attention in attentions]
        self._blocks = [attention.latent_slices for attention in attentions]
        self._whole = [block.stop - block.start for blocks in self._blocks for block in blocks]
        self._ranks = self._whole  # that count now
        for down in self._downs:
            weight = next(down.parameters())
            width = getattr(down, "out_features", None) or len(weight)
            # A buffer that is refilled and never exchanged: a compiled layer reads it without being compiled again.
            down.register_buffer(MASK, torch.ones(width, device=weight.device), persistent=False)
            down.register_forward_hook(_masked)

    @contextmanager
    def drawn(self, step: int) -> Iterator[float | None]:
        """Cuts for the length of a ``with`` block to what a step, counted from 0, draws.

        Every share is equally likely. Half of the steps draw one for all blocks, since that is what a slice has, and
        gives it; the others draw one for every block, as the paper does, and give None.
        """
        alike, which = _numbers(2, self._seed, step)
        share = self._share(which) if alike < ALIKE else None
        apart = [_numbers(len(blocks), self._seed, step, layer) for layer, blocks in enumerate(self._blocks)]
        with self._cut(lambda layer, block: self._share(apart[layer][block]) if share is None else share):
            yield share

    @contextmanager
    def cut(self, share: float) -> Iterator[None]:
        """Cuts every block to a share of its latents for the length of a ``with`` block."""
        with self._cut(lambda layer, block: share):
            yield

    def kept(self) -> float:
        """Share of all latents of the student that count now."""
        return sum(self._ranks) / sum(self._whole)

    def _share(self, number: float) -> float:
        """One of the shares, by a number from 0 to below 1."""
        return self.shares[int(number * len(self.shares))]

    @contextmanager
    def _cut(self, share: Callable[[int, int], float]) -> Iterator[None]:
        masks, self._ranks = [getattr(down, MASK) for down in self._downs], []
        with torch.no_grad():
            for layer, (mask, blocks) in enumerate(zip(masks, self._blocks, strict=True)):
                for number, block in enumerate(blocks):
                    rank = kept_rank(share(layer, number), block.stop - block.start)
                    mask[block.start + rank : block.stop] = 0
                    self._ranks.append(rank)
        try:
            yield
        finally:
            for mask in masks:
                mask.fill_(1)
            self._ranks = self._whole


def kept_rank(share: float, rank: int) -> int:
    """Latents that a share of a block's `rank` latents is: rounded, and one at least."""
    return max(1, int(share * rank + 0.5))


def nested_attentions(student: nn.Module) -> list[nn.Module]:
    """The attention of every layer, all of which cache latents that may be cut.

    Raises:
        SurgeryError: one does not.
    """
    attentions = [attention_of(layer) for layer in decoder_of(student).layers]
    for index, attention in enumerate(attentions):
        if not getattr(attention, "latent_slices", None):
            raise SurgeryError(
                f"nested_ranks: {type(attention).__name__} of layer {index} has no latents that training could cut: "
                "convert --to lowrank, or --to mla --carrier own",
                setting="nested_ranks",
            )
    return attentions


def _masked(down: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * getattr(down, MASK).to(output.dtype)


def _numbers(count: int, *key: int) -> list[float]:
    """Numbers from 0 to below 1 that follow from a key; of text Python makes the same ones in every version."""
    source = random.Random("/".join(map(str, key)))
    return [source.random() for _ in range(count)]
