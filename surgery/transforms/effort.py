"""How hard fits try, said once for all of them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Of a fit by :func:`surgery.transforms.attention_fit.fit_attention`.

    Attributes:
        steps: of Gauss and Newton.
        iterations: of conjugate gradients in each.
        queries: query positions sampled from each sequence, anew in every step.
        seed: of the sampling.
    """

    steps: int = 3
    iterations: int = 8
    queries: int = 256
    seed: int = 0


USUAL = Effort()
