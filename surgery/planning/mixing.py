"""Looks for a mixture of candidates, layer by layer, that costs less than every candidate alone.

What each candidate cost as a whole is dealt out to its layers by the errors of their outputs in the metric of the loss,
and what it cost on the answers of recall prompts by those at the answers: the costs of its layers add up to what was
measured. A candidate for every layer within the bytes is then a knapsack. A few such choices are simulated exactly as
candidates are. Around the best of them single layers are exchanged, which measures what layers cost there, and the
choice is made anew with these costs, as long as that helps and simulations are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from surgery.architectures.own_class import layer_entries, own_config
from surgery.calibration.held_out import HeldOut
from surgery.planning.candidates import Candidates, Sized
from surgery.planning.cost import Cost
from surgery.planning.measure import Carried, Scored, carry
from surgery.planning.mixture import Mixture, layer_bytes
from surgery.planning.settings import PlanSettings
from surgery.structures.work import Work
from surgery.transforms.allocation import Frontier

EXPONENTS = (1.0, 0.5)
"""Of the errors that costs are dealt out by: losses that are no longer small differ less than errors by layer."""
ROUNDS = 3  # these numbers were chosen on the demo model alone
"""Of exchanges, or of aims at a loss, at most."""
PRICE_STEP = 0.05
"""Share of the bytes over which the price of one is looked at."""

Choice = tuple[int, ...]
"""An option for every layer."""


class Mixer:
    """Finds mixtures of measured candidates; options of a layer are the candidates and, last, the layer as it is.

    Args:
        tried: the candidates, which ``carried`` says all of.
        held_out: what they were measured on.
        later: as of `carry`, of what follows the mixtures.

    Attributes:
        found: mixtures that were simulated, and how they scored.
    """

    def __init__(
        self,
        candidates: Candidates,
        tried: Sequence[Sized],
        carried: Carried,
        work: Work,
        held_out: HeldOut,
        settings: PlanSettings,
        later: int = 0,
    ):
        self._work, self._held_out, self._settings, self._later = work, held_out, settings, later
        self._cost, self._left = Cost(carried.source), settings.mixtures
        places = [(place, part) for place, each in enumerate(tried) if (part := candidates.part(each))]
        self._items: list[Sized | None] = [*(part for _, part in places), None]
        opened, source = work.opened, work.opened.reader.config
        configs = [*(part.config for _, part in places), own_config(source, layer_entries(source))]
        self._sizes = torch.tensor([layer_bytes(config, opened, settings) for config in configs]).double()
        self._scored = [carried.scored[place] for place, _ in places]
        nothing = (0.0, 0.0)
        self._errors = torch.tensor(
            [
                *([errors.get(id(tried[place]), nothing) for errors in carried.errors] for place, _ in places),
                [nothing] * opened.layers,
            ]
        ).double()  # [options, layers, text and answers]
        # One option for all layers is known already.
        alone = enumerate([*self._scored, carried.source])
        self._simulated: dict[Choice, Scored] = {(option,) * opened.layers: scored for option, scored in alone}
        self.found: list[tuple[Mixture, Scored]] = []

    def best(self, count: int, size: float | None) -> list[Mixture]:
        """Of the mixtures that were simulated, of no more bytes if that is given, those that cost least."""
        fitting = [each for each in self.found if size is None or each[0].kv_bytes <= size]
        return [mixture for mixture, _ in sorted(fitting, key=lambda each: self._cost(each[1]))[:count]]

    def within(self, size: float) -> None:
        """Looks for what costs least within so many bytes, and refines it."""
        menus = [self._dealt(exponent) for exponent in EXPONENTS]
        best = self._best(
            [self._chosen(costs, size) for costs in (*menus, self._by_errors(), self._of_best(menus[0], size))]
        )
        costs = menus[0]
        for _ in range(ROUNDS):
            if best is None or self._left < 2:
                return
            costs, near = self._exchange(costs, best, size)
            better = self._best([self._chosen(costs, size), self._chosen(costs.where(near, torch.inf), size), best])
            if better == best:
                return
            best = better

    def for_loss(self, loss: float) -> None:
        """Looks for the fewest bytes that lose no more."""
        for costs in map(self._dealt, EXPONENTS):
            frontier, aim = self._frontier(costs, float(self._sizes[-1].sum())), loss
            for _ in range(ROUNDS):
                choice = frontier.for_cost(aim)
                if choice is None or self._best([tuple(choice)]) is None:
                    break
                aim *= loss / max(self._cost.increase(self._simulated[tuple(choice)]).mean, loss / 4)

    def _dealt(self, exponent: float) -> Tensor:
        """Costs [options, layers] that add up to what each candidate was measured to cost."""
        shares = self._errors**exponent
        shares /= shares.sum(1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
        measured = [self._cost.parts(scored) for scored in self._scored]
        return (shares * torch.tensor([*measured, (0.0, 0.0)]).double()[:, None]).sum(-1)

    def _by_errors(self) -> Tensor:
        """Costs that are errors times one number: what candidates that lose much would cost a layer among others."""
        whole = self._errors[..., 0].sum(1)
        factors = [
            self._cost(scored) / float(error) for scored, error in zip(self._scored, whole, strict=False) if error
        ]
        return self._errors[..., 0] * max(median(factors or [0.0]), 0.0)

    def _of_best(self, costs: Tensor, size: float) -> Tensor:
        """The costs, of options that are of the structure that costs least within the bytes."""
        fitting = [place for place, held in enumerate(self._sizes.sum(1)[:-1]) if held <= size]
        if not fitting:
            return costs
        best = self._items[min(fitting, key=lambda place: self._cost(self._scored[place]))].target
        own = torch.tensor([item is not None and item.target is best for item in self._items])
        return costs.where(own[:, None], torch.inf)

    def _frontier(self, costs: Tensor, most: float) -> Frontier:
        pairs = torch.stack([self._sizes, costs], dim=-1).transpose(0, 1).tolist()
        return Frontier(pairs, most)

    def _chosen(self, costs: Tensor, size: float) -> Choice | None:
        choice = self._frontier(costs, size).within(size)
        return choice and tuple(choice)

    def _best(self, choices: Sequence[Choice | None]) -> Choice | None:
        """Of choices, simulated as far as that may go on, the one that costs least."""
        known = [choice for choice in dict.fromkeys(choices) if choice is not None]
        self._simulate(known)
        measured = [choice for choice in known if choice in self._simulated]
        return min(measured, key=lambda choice: self._cost(self._simulated[choice]), default=None)

    def _simulate(self, choices: Sequence[Choice]) -> None:
        new = [choice for choice in choices if choice not in self._simulated]
        lines, mixtures = [], []
        for choice in new[: self._left]:
            line = [self._items[option] for option in choice]
            if (mixture := Mixture.of(line, self._work.opened, self._settings)) is not None:
                lines.append(line)
                mixtures.append((choice, mixture))
        if not lines:
            return
        self._left -= len(lines)
        later = self._left * self._held_out.tokens.numel() + self._later
        scored = carry(lines, self._work, self._held_out, later=later).scored
        self._simulated |= {choice: score for (choice, _), score in zip(mixtures, scored, strict=True)}
        self.found += [(mixture, score) for (_, mixture), score in zip(mixtures, scored, strict=True)]

    def _exchange(self, costs: Tensor, best: Choice, size: float) -> tuple[Tensor, Tensor]:
        """Measures what single layers cost in another option; the costs with these, and which options they are of."""
        step = PRICE_STEP * size
        frontier = self._frontier(costs, size).costs
        price = float(frontier[int((1 - PRICE_STEP) * Frontier.STEPS)] - frontier[-1]) / step
        price = price if price < float("inf") else 0.0
        moves = [(layer, option) for layer, now in enumerate(best) for option in self._beside(costs, layer, now)]

        def regret(move: tuple[int, int]) -> float:
            layer, option = move
            now = best[layer]
            saved = self._sizes[now, layer] - self._sizes[option, layer]
            return float(costs[option, layer] - costs[now, layer] - price * saved)

        moves = sorted(moves, key=regret)[: max(1, self._left // 2)]
        changed = {(*best[:layer], option, *best[layer + 1 :]): (option, layer) for layer, option in moves}
        self._simulate(list(changed))
        costs, near = costs.clone(), torch.zeros_like(costs, dtype=torch.bool)
        for layer, option in enumerate(best):
            near[option, layer] = True
        for choice, (option, layer) in changed.items():
            if choice in self._simulated:
                more = self._cost(self._simulated[choice]) - self._cost(self._simulated[best])
                costs[option, layer] = costs[best[layer], layer] + more
                near[option, layer] = True
        return costs, near

    def _beside(self, costs: Tensor, layer: int, now: int) -> list[int]:
        """The options of a layer that are next larger and next smaller, of those that no smaller one beats."""
        order = sorted(range(len(self._items)), key=lambda option: (self._sizes[option, layer], costs[option, layer]))
        front: list[int] = []
        for option in order:
            if not front or costs[option, layer] < costs[front[-1], layer]:
                front.append(option)
        smaller = [option for option in front if self._sizes[option, layer] < self._sizes[now, layer]]
        larger = [option for option in front if self._sizes[option, layer] > self._sizes[now, layer]]
        return [*smaller[-1:], *larger[:1]]
