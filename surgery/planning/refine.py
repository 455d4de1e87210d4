"""``--refine``: which candidate each layer is to be of, learned by gradient around the choice of a plan.

Every layer gets gates between a ladder of candidates (:mod:`surgery.planning.gates`). Their gradients, of the
divergence from the source, add up to what each candidate costs in each layer while the others are what they are likely
to become; gates open by these costs, at the bytes that may be kept, and ever more sharply: dual averaging with an
entropy (Xiao, Dual Averaging Methods for Regularized Stochastic Learning, JMLR 11, 2010). Steps of Adam, which are of
one size whatever is to be won, took noise for a gain on the demo model. In the end a candidate for every layer within
the bytes is a knapsack. It is a mixture like any other: simulated, compared with the choice on texts that the gates
have not seen, and kept only where it loses less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from surgery.architectures.own_class import layer_entries, own_config
from surgery.calibration.held_out import HeldOut
from surgery.calibration.texts import further_text
from surgery.common.errors import SurgeryError
from surgery.common.human import size
from surgery.planning.candidates import Candidates, Sized
from surgery.planning.gates import GatedAttention, GatedModel, within
from surgery.planning.measure import LATER, Line, carry
from surgery.planning.mixture import Mixture, layer_bytes
from surgery.planning.rounds import Scores
from surgery.planning.rows import Row, alike, far_behind
from surgery.planning.settings import PlanSettings
from surgery.running.source import Source
from surgery.structures.passing import source_attention
from surgery.structures.work import Work
from surgery.transforms.allocation import Frontier

FACTORS = (0.75, 0.87, 1.15, 1.33)  # these numbers were chosen on the demo model alone
"""Of the bytes of the choice: what else its structure is weighed at in every layer."""
REACH = 2.0
"""How many times more or fewer bytes other candidates in the ladder may take."""
OTHERS = 2
"""Candidates of other structures, or bits, in the ladder."""
TEMPERATURES = 1.0, 0.3
"""Of the gates at the first and at the last step, in costs off the line of cost by size."""
PASSES = 10
"""A step of five options takes about as long as reading its text so often: the source once, what is gated forward,
again and backward, each with its options in the place of an attention."""
LOOP = "refine"


@dataclass(frozen=True)
class Refined:
    """What became of a refinement; plain values only.

    Attributes:
        kept: whether the refined plan is the choice now.
        told: for people, in a line.
        loss_increase, before: of the refined plan and of the choice, nats per token on the same held-out texts; None
            where nothing was compared.
        tokens, seed: of what was learned, a sequence a step; 0 tokens where nothing was.
    """

    kept: bool
    told: str
    loss_increase: float | None = None
    before: float | None = None
    tokens: int = 0
    seed: int = 0


def refine(
    chosen: Row,
    weighed: Sequence[tuple[Sized | Mixture, Row]],
    candidates: Candidates,
    work: Work,
    held_out: HeldOut,
    settings: PlanSettings,
    share: float,
    told: Callable[[Sequence[Sized | Mixture], Scores], list[Row]],
) -> tuple[Refined, Row | None]:
    """Refines the choice of a plan.

    Args:
        weighed: all that was measured, with its row.
        held_out: texts and prompts on which the choice and what comes of it are compared.
        share: of the source's bytes that may be kept.
        told: rows of candidates by their scores.

    Returns:
        What became of it, and the row to choose; None where the choice stays.
    """
    opened = work.opened
    choice = next(each for each, row in weighed if (row.to, row.asked) == (chosen.to, chosen.asked))
    options = ladder(choice, _near(chosen, weighed), candidates, opened.layers)
    refinement = Refinement(options, work, settings, share * candidates.source_bytes)
    if not refinement.can_learn:
        return Refined(False, "nothing to refine: no candidates near the choice can stand beside each other"), None
    if Mixture.of([[*options, None][layer % 2] for layer in range(opened.layers)], opened, settings) is None:
        return Refined(False, f"nothing to refine: {settings.engine} takes no layers that differ"), None
    tokens = further_text(opened, settings, held_out, settings.refine_tokens, work.progress)
    work.progress.expect({LOOP: PASSES * tokens.numel(), LATER: 3 * held_out.tokens.numel()})  # both, and the source
    line = refinement.learned(tokens)
    mixture = Mixture.of(line, opened, settings)
    if mixture is None:
        return Refined(False, f"what was refined {settings.engine} does not load: not kept"), None
    carried = carry([choice.over(opened.layers), line], work, held_out)
    before, after = told([choice, mixture], [(score, carried.source) for score in carried.scored])
    kept = after.loss_increase < before.loss_increase and alike([before, after], share)[0] == 1
    losses = after.loss_increase, before.loss_increase
    said = f"refined on {tokens.numel():,} tokens: {losses[0]:+.4f} nats for {losses[1]:+.4f} on {held_out.texts} texts"
    refined = Refined(kept, f"{said}, {'kept' if kept else 'not kept'}", *losses, tokens.numel(), settings.seed)
    return refined, after if kept else None


def foreseen(settings: PlanSettings, held_out: HeldOut) -> int:
    """Tokens that a refinement reads, times models, for the time left; those of gated steps count :data:`PASSES`."""
    tokens = settings.refine_tokens
    return PASSES * tokens + 3 * held_out.tokens.numel() if tokens else 0


def refuse_too_large(opened: Source, settings: PlanSettings) -> None:
    """Refuses a source that does not fit in the memory as a whole. Raises SurgeryError."""
    reader, device, width = opened.reader, opened.stream.device, opened.stream.dtype.itemsize
    held = sum(math.prod(reader.info(name).shape) for name in reader.names()) * width
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if held > free:
        raise SurgeryError(
            f"refine holds the whole model in memory, {size(held)} in {settings.dtype}, and {size(free)} are free: "
            "leave it out, or give --dtype bfloat16"
        )


def _near(chosen: Row, weighed: Sequence[tuple[Sized | Mixture, Row]]) -> list[Sized]:
    """Candidates of about the choice's bytes that are not far behind others, the nearest first."""
    behind, found = far_behind([row for _, row in weighed]), []
    for place, (each, row) in enumerate(weighed):
        off = abs(math.log(row.kv_ratio / chosen.kv_ratio))
        if place not in behind and isinstance(each, Sized) and off <= math.log(REACH):
            found.append((off, place, each))
    return [each for *_, each in sorted(found)]


def ladder(choice: Sized | Mixture, others: Sequence[Sized], candidates: Candidates, layers: int) -> list[Sized]:
    """Candidates around a choice whose layers can stand beside each other, those of the choice first.

    Args:
        others: the nearest first.
    """
    items = {id(item): item for item in choice.over(layers) if item}
    most = Counter(id(item) for item in choice.over(layers) if item).most_common()
    found = [part for key, _ in most if (part := candidates.part(items[key]))]
    ways = {_way(part) for part in found}
    if found:
        found += _other_sizes(found[0], candidates)
    room = len(found) + OTHERS
    for other in others:
        if len(found) < room and _way(other) not in ways and (part := candidates.part(other)):
            ways.add(_way(other))
            found.append(part)
    return _apart(found)


def _other_sizes(part: Sized, candidates: Candidates) -> Iterator[Sized]:
    """The same of more and of fewer bytes, where its size can be chosen."""
    if "kv_ratio" not in part.asked:
        return
    asked = {name: value for name, value in part.asked.items() if name != "kv_ratio"}
    for factor in FACTORS:
        share = factor * part.kv_bytes / candidates.source_bytes
        if share < 1 and (other := candidates.sized(part.target, asked, share, mixes=part.mixes, told=False)):
            yield other


def _way(sized: Sized) -> tuple:
    return sized.target.name, sized.asked.get("bits")


def _apart(found: Sequence[Sized]) -> list[Sized]:
    """Without those that come to the same."""
    kept: list[Sized] = []
    for sized in found:
        if all(sized.config != other.config for other in kept):
            kept.append(sized)
    return kept


class Refinement:
    """Learns a line of candidates within bytes.

    Args:
        options: for every layer, beside the layer as it is.
        held: bytes that may be kept.
    """

    def __init__(self, options: Sequence[Sized], work: Work, settings: PlanSettings, held: float):
        self._work, self._settings, opened = work, settings, work.opened
        source = opened.reader.config
        configs = [*(part.config for part in options), own_config(source, layer_entries(source))]
        sizes = torch.tensor([layer_bytes(config, opened, settings) for config in configs]).double().T / held
        self._gated = [layer for layer in range(opened.layers) if layer not in opened.fixed]
        self._options: list[Sized | None] = [*options, None]
        self._sizes = sizes[self._gated]  # [gated layers, options]
        # Layers that stay whatever is chosen take of the bytes too.
        self._budget = 1 - float(sizes[:, -1].sum() - self._sizes[:, -1].sum())
        least = self._sizes[:, :-1].min(1).values if options else self._sizes[:, -1]
        if float((least.sum() - least + self._sizes[:, -1]).min()) > self._budget:
            self._options, self._sizes = self._options[:-1], self._sizes[:, :-1]  # no layer fits as it is

    @property
    def can_learn(self) -> bool:
        """Whether there is a choice, and a line within the bytes."""
        return len(self._options) > 1 and float(self._sizes.min(1).values.sum()) <= self._budget

    def learned(self, tokens: Tensor) -> Line:
        """Learns what options cost from sequences [N, T], a step each; the line that costs least within the bytes.

        Goes on with what a plan that was killed had learned.
        """
        generator = torch.Generator().manual_seed(self._settings.seed)
        sums = torch.zeros(2, *self._sizes.shape, dtype=torch.float64)  # of gradients, and of probabilities
        first, steps = 0, len(tokens)
        if state := self._work.snapshots.last(LOOP):
            first, sums = state["done"], state["sums"].clone()
            generator.set_state(state["generator"].clone())
        with ExitStack() as stack, self._work.progress.phase("refine", steps, "step") as advance:
            advance(first)
            model = self._model(stack) if first < steps else None
            for step in range(first, steps):
                chances = self._chances(_costs(sums), step / steps)
                sums += torch.stack([model.gradients(tokens[step : step + 1], chances, generator), chances.exp()])
                if not sums.isfinite().all():
                    raise SurgeryError(f"refine: gradients of step {step + 1} are not finite; try --dtype float32")
                state = {"done": step + 1, "sums": sums, "generator": generator.get_state()}
                self._work.snapshots.take(LOOP, lambda state=state: state)
                advance()
        return self._cheapest(_costs(sums))

    def _chances(self, costs: Tensor, progress: float) -> Tensor:
        """Log-probabilities of options [L, K] that cost so much, the sharper the further on.

        Costs count by how far they are off a line of cost by size: the choice lies near where that is level.
        """
        costs, sizes = (each - each.mean(-1, keepdim=True) for each in (costs, self._sizes))
        slope = (costs * sizes).sum() / sizes.square().sum().clamp_min(torch.finfo(sizes.dtype).tiny)
        spread = (costs - slope * sizes).abs().median()
        start, end = TEMPERATURES
        temperature = start * (end / start) ** progress * float(spread)
        return within(-costs / temperature if temperature else costs, self._sizes, self._budget)

    def _model(self, stack: ExitStack) -> GatedModel:
        """All layers with their options."""
        opened, stream = self._work.opened, self._work.opened.stream
        layers = [stack.enter_context(stream.layer(index)) for index in range(opened.layers)]
        caches = {id(item): item.caches() for item in self._options if item}
        attentions = [
            GatedAttention(
                [
                    item.structure.closed_form(self._work, index, caches[id(item)][index])
                    if item
                    else source_attention(opened, index)
                    for item in self._options
                ]
            )
            if index in self._gated
            else None
            for index in range(opened.layers)
        ]
        return GatedModel(stream, layers, attentions)

    def _cheapest(self, costs: Tensor) -> Line:
        """The line of least cost within the bytes; the smallest where sizes, rounded up, leave no other."""
        pairs = torch.stack([self._sizes, costs], dim=-1).tolist()
        places = Frontier(pairs, self._budget).within(self._budget) or self._sizes.argmin(1).tolist()
        line: list[Sized | None] = [None] * self._work.opened.layers
        for layer, place in zip(self._gated, places, strict=True):
            line[layer] = self._options[place]
        return line


def _costs(sums: Tensor) -> Tensor:
    """Of options [L, K], by the sums of gradients and of probabilities."""
    gradients, chances = sums
    return gradients / chances.clamp_min(torch.finfo(chances.dtype).tiny)
