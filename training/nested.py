"""Nested ranks: training after which every slice of the student is a good model (MatryoshkaKV, arXiv:2410.14731).

Conversions order latents by importance, and a slice keeps the first elements of every block. Here every step draws a
rank per block and zeroes the latents beyond it: the step computes exactly what the slice computes.
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
"""Fraction of the steps that cut all blocks to one share, as slices do; otherwise each block draws its own."""

MASK = "latent_mask"
"""Non-persistent buffer of a down-projection: 1 for outputs that are kept, 0 for outputs that are zeroed."""


class NestedRanks:
    """Masks that zero the latents of a student beyond drawn ranks, `shares` of a block's latents.

    A draw depends on seed, step, layer and block alone: a resumed run draws like an uninterrupted one, and all
    processes and batches of a step draw alike. Outside `drawn` and `cut` nothing is masked.
    """

    def __init__(self, student: nn.Module, shares: Sequence[float], seed: int) -> None:
        """Register masks on a student, which is on its device and may be wrapped or have adapters.

        Raises SurgeryError: a layer has no latents that can be cut.
        """
        self.shares, self._seed = tuple(shares), seed
        attentions = nested_attentions(student)
        self._downs = [attention.kv_down for attention in attentions]
        self._blocks = [attention.latent_slices for attention in attentions]
        self._whole = [block.stop - block.start for blocks in self._blocks for block in blocks]
        self._ranks = self._whole  # current ranks
        for down in self._downs:
            weight = next(down.parameters())
            width = getattr(down, "out_features", None) or len(weight)
            # The buffer is refilled in place and never replaced, so that compiled layers are not recompiled.
            down.register_buffer(MASK, torch.ones(width, device=weight.device), persistent=False)
            down.register_forward_hook(_masked)

    @contextmanager
    def drawn(self, step: int) -> Iterator[None]:
        """Cut blocks to the shares drawn for a step, counted from 0, in a ``with`` block.

        Every share is equally likely. Half of the steps draw one share for all blocks, as slices have, the others one
        per block, as in the paper.
        """
        alike, draw = _random_numbers(2, self._seed, step)
        share = self._share(draw) if alike < ALIKE else None
        draws = [_random_numbers(len(blocks), self._seed, step, layer) for layer, blocks in enumerate(self._blocks)]
        with self._cut(lambda layer, block: self._share(draws[layer][block]) if share is None else share):
            yield

    @contextmanager
    def cut(self, share: float) -> Iterator[None]:
        """Cut every block to a share of its latents in a ``with`` block."""
        with self._cut(lambda layer, block: share):
            yield

    def kept(self) -> float:
        """Return the share of the student's latents that is not masked now."""
        return sum(self._ranks) / sum(self._whole)

    def _share(self, number: float) -> float:
        """Map a number in [0, 1) to one of the shares."""
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
    """Return the rank that a share of a block's `rank` latents is: rounded, at least 1."""
    return max(1, int(share * rank + 0.5))


def nested_attentions(student: nn.Module) -> list[nn.Module]:
    """Return the attention of every layer, each with latents that can be cut.

    Raises SurgeryError: a layer's attention has no `latent_slices`.
    """
    attentions = [attention_of(layer) for layer in decoder_of(student).layers]
    for index, attention in enumerate(attentions):
        if not getattr(attention, "latent_slices", None):
            raise SurgeryError(
                f"nested_ranks: {type(attention).__name__} of layer {index} has no latents to truncate; "
                "convert --to lowrank, or --to mla --carrier own",
                setting="nested_ranks",
            )
    return attentions


def _masked(down: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * getattr(down, MASK).to(output.dtype)


def _random_numbers(count: int, *key: int) -> list[float]:
    """Draw numbers in [0, 1) from a key, formatted as text: a text seed gives equal numbers in every Python version."""
    source = random.Random("/".join(map(str, key)))
    return [source.random() for _ in range(count)]
