"""A short text, and what a checkpoint's logits are on it: enough to tell at any time whether it computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.verification.caches import new_cache

TOKENS, PROMPT, TOP = 64, 56, 8
"""Tokens in all and those that come at once, the others one by one; logits that are kept of a place."""
_SEED = 20


@dataclass(frozen=True)
class Probe:
    """Tokens and logits; plain values only.

    Attributes:
        tokens: of one sequence.
        prompt: how many come at once.
        dtype: that the model ran in.
        places: of tokens whose next ones are looked at.
        ids, logits: the largest logits at each place, and which tokens' they are.
    """

    tokens: list[int]
    prompt: int
    dtype: str
    places: list[int]
    ids: list[list[int]]
    logits: list[list[float]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Probe:
        """What :meth:`to_dict` gave.

        Raises:
            SurgeryError: it is damaged.
        """
        try:
            probe = cls(**said)
            flat = [*probe.tokens, probe.prompt, *probe.places, *(each for row in probe.ids for each in row)]
            numbers = [each for row in probe.logits for each in row]
            sizes = {len(probe.places), len(probe.ids), len(probe.logits)}
            good = all(type(each) is int and each >= 0 for each in flat) and all(
                type(each) is float or type(each) is int for each in numbers
            )
            good = good and len(sizes) == 1 and 0 < probe.prompt <= len(probe.tokens) <= 16 * TOKENS
            good = (
                good and max(probe.places) < len(probe.tokens) and isinstance(getattr(torch, probe.dtype), torch.dtype)
            )
            good = good and [len(row) for row in probe.ids] == [len(row) for row in probe.logits]
        except (TypeError, ValueError, AttributeError):
            good = False
        if not good:
            raise SurgeryError("its record of logits is damaged")
        return probe

    def difference(self, run: ProbeRun) -> float:
        """Largest difference of logits of a run over the same tokens, relative to the largest logit.

        Raises:
            SurgeryError: the model has no such tokens.
        """
        logits = run.logits(self.places)
        wanted, ids = torch.tensor(self.logits, dtype=torch.float64), torch.tensor(self.ids)
        if ids.max() >= logits.shape[-1]:
            raise SurgeryError(f"its record of logits is of a vocabulary larger than {logits.shape[-1]}")
        return float((logits.gather(1, ids) - wanted).abs().max() / wanted.abs().max())


class ProbeRun:
    """The probe on its way through a model, one block of layers after the other.

    Attributes:
        hidden: [1, T, D], what enters the next block.
        cache: of the last block, full.
    """

    def __init__(self, stream: LayerStream, probe: Probe | None = None):
        """Args: ``probe`` whose tokens are read, by default new ones."""
        self._stream = stream
        if probe is None:
            length = max(2, min(TOKENS, stream.config.max_position_embeddings))
            generator = torch.Generator().manual_seed(_SEED)
            self.tokens = torch.randint(stream.config.vocab_size, (1, length), generator=generator)
            self.prompt = max(1, length * PROMPT // TOKENS)
        else:
            self.tokens, self.prompt = torch.tensor([probe.tokens]), probe.prompt
        self.hidden = stream.embed(self.tokens)

    @torch.no_grad()
    def through(self, layer: StreamedLayer) -> Tensor:
        """Through the next block and its cache."""
        self.cache = new_cache(layer)
        self.hidden = layer.decode(self.hidden, self.prompt, self.cache)
        return self.hidden

    def logits(self, places: list[int]) -> Tensor:
        """Logits [places, V] in float64, once it went through all blocks."""
        return self._stream.logits(self.hidden[0, places]).double().cpu()

    def found(self) -> Probe:
        """For the report."""
        length = self.tokens.shape[1]
        places = sorted({max(0, length * part // 4 - 1) for part in (1, 2, 3, 4)})
        top = self.logits(places).topk(min(TOP, self._stream.config.vocab_size))
        rounded = [[float(f"{value:.7g}") for value in row] for row in top.values.tolist()]
        dtype = str(self._stream.dtype).removeprefix("torch.")
        return Probe(self.tokens[0].tolist(), self.prompt, dtype, places, top.indices.tolist(), rounded)
