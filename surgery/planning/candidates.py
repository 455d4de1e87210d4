"""Candidates of every structure, sized so that their bytes fit the shares that are weighed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.engines.cache_formats import TENSORRT_LLM
from surgery.engines.table import refuse_unless_loadable
from surgery.families import LATENT_FAMILIES
from surgery.planning.settings import BITS, PlanSettings
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import Source
from surgery.structures.base import Candidate, Structure
from surgery.structures.context import ConversionContext
from surgery.structures.registry import TARGETS, Target

TOLERANCE = 0.02
"""How far below a share bytes may stay, relatively, before a larger result is looked for."""
ATTEMPTS = 5
LEAST_RATIO = 0.01
SMALL_RATIOS = (LEAST_RATIO, 0.02, 0.04, 0.08)


@dataclass(frozen=True)
class Sized:
    """A conversion that could be asked for, its budget spent.

    Attributes:
        asked: of its settings, those that are not the plan's own.
        kv_bytes: of all sequences at the plan's context.
        engines: what each says of the result.
        engine, status: None, as it is no format of an engine's own.
    """

    target: Target
    asked: dict[str, Any]
    settings: ConversionSettings
    structure: Structure
    config: dict[str, Any]
    kv_bytes: float
    engines: dict[str, dict]
    engine = status = None

    @property
    def name(self) -> str:
        """Name, as an option of ``surgery convert``."""
        return _named(self.target, self.asked)

    @property
    def to(self) -> str:
        """The target's name."""
        return self.target.name

    def command(self, called: str) -> str:
        """Command line that converts the source ``called`` so."""
        return f"surgery convert {called} {self.name}"

    def leaves(self, layer: int) -> bool:
        """Return whether a layer stays unchanged."""
        return layer in self.structure.opened.fixed

    def group(self, layer: int) -> range:
        """The layers that only run together with this one."""
        return self.structure.group(layer)

    def attention(self, work: ConversionContext, layer: int) -> nn.Module:
        """A simulation of a layer's attention, as it becomes."""
        return self.structure.closed_form(work, layer)

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Carry [N, T, D], in place, through layers that only run together."""
        return self.structure.pass_group(work, group, hidden)


class Candidates:
    """Sizes what could be asked for.

    Args:
        opened: the source.
        work: with the statistics of all layers, and no held-out text, so that no budget is spent by trying; None for
            a dry run, which deals nothing out by layer.
        refused: filled with what the source or the engine does not take, and why.
    """

    def __init__(self, opened: Source, work: ConversionContext | None, settings: PlanSettings):
        self._opened, self._work, self._settings = opened, work, settings
        self._progress = Progress(silent=True) if work is None else work.progress
        self.refused: dict[str, str] = {}
        self.source_bytes = held_bytes(opened.reader.config, opened, settings)

    def at(self, shares: Sequence[float]) -> Iterator[Sized]:
        """Every candidate: those whose size can be chosen once for each share of the source's bytes."""
        configs = []  # two ways of asking may come to one result
        for target, overrides, candidate in self._allowed():
            sizes = set()  # a structure may have no more to spend a larger share on
            for share in shares if candidate.scales else (None,):
                sized = self.sized(target, overrides, share)
                if sized and sized.kv_bytes not in sizes and sized.config not in configs:
                    sizes.add(sized.kv_bytes)
                    configs.append(sized.config)
                    yield sized

    def smallest(self) -> list[Sized]:
        """Return the candidates whose size can be chosen, each at the smallest of a few ratios that it takes."""
        results = []
        for target, overrides in [
            (target, overrides) for target, overrides, candidate in self._allowed() if candidate.scales
        ]:
            options = (self.sized(target, {"kv_ratio": ratio, **overrides}, None) for ratio in SMALL_RATIOS)
            results += filter(None, [next(filter(None, options), None)])
        return results

    def _allowed(self) -> Iterator[tuple[Target, dict[str, Any], Candidate]]:
        """Yield the candidates to weigh, with the settings that go with them."""
        for target, candidate in allowed_candidates(self._opened.reader.config, self._settings):
            yield target, {**candidate.settings, **self._own_of(target)}, candidate

    def sized(
        self, target: Target, overrides: dict[str, Any], share: float | None, *, record: bool = True
    ) -> Sized | None:
        """The candidate with at most that share of the source's bytes, its own if None; None where it is refused.

        Args:
            record: whether :attr:`refused` is to have it.
        """
        try:
            result = self._made(target, overrides) if share is None else self._fitting(target, overrides, share)
            if result is None:
                return None
            if self._work is None:
                return result
            result.structure.plan(self._work)
            # The ranks that a plan settles decide the bytes of first tokens.
            config = result.structure.forecast().config
            return replace(result, config=config, kv_bytes=held_bytes(config, self._opened, self._settings))
        except SurgeryError as error:
            if record:
                self.refused[_named(target, overrides)] = str(error)
            return None

    def _fitting(self, target: Target, overrides: dict[str, Any], share: float) -> Sized | None:
        """The largest found that keeps to a share."""
        ratio, best, before = share, None, None
        for _ in range(ATTEMPTS):
            try:
                sized = self._made(target, {"kv_ratio": round(ratio, 4), **overrides})
            except SurgeryError:
                if best is None:
                    raise
                break  # what fits is there, if nothing closer is
            ratio_of_source = sized.kv_bytes / self.source_bytes
            if ratio_of_source <= share and (best is None or sized.kv_bytes > best.kv_bytes):
                best = sized
            if (1 - TOLERANCE) * share <= ratio_of_source <= share:
                break
            # Bytes grow with the ratio along a line, which full-precision tokens keep from passing through zero.
            slope = (
                ratio_of_source / ratio
                if before is None or before[0] == ratio
                else (ratio_of_source - before[1]) / (ratio - before[0])
            )
            before = ratio, ratio_of_source
            aim = share * (1 - TOLERANCE / 2)
            ratio = min(max(ratio + (aim - ratio_of_source) / slope if slope > 0 else ratio / 2, LEAST_RATIO), 0.99)
        return best

    def _made(self, target: Target, overrides: dict[str, Any]) -> Sized:
        structure = structure_of(target, overrides, self._opened, self._settings, self._progress)
        forecast = structure.forecast()
        config = forecast.config
        if self._settings.engine:
            refuse_unless_loadable(self._settings.engine, config)
        num_bytes = held_bytes(config, self._opened, self._settings)
        engines = forecast.engines_of(self._opened.reader, config)
        return Sized(target, overrides, structure.settings, structure, config, num_bytes, engines)

    def _own_of(self, target: Target) -> dict[str, Any]:
        """Return the plan's settings that only some structures take: the engine, whose limits hold, and the heads, with
        the context at which their bytes are counted."""
        heads = {"heads": self._settings.heads, "context": self._settings.tokens} if self._settings.heads else {}
        values = {"engine": self._settings.engine, **heads}
        return {name: value for name, value in values.items() if value and hasattr(target.settings_class, name)}


def structure_of(
    target: Target, overrides: Mapping[str, Any], opened: Source, settings: PlanSettings, progress: Progress
) -> Structure:
    """The structure that converts a source by a plan's settings and a candidate's own.

    Raises:
        SurgeryError: the source cannot be converted so.
    """
    own = target.settings({**settings.common(), **overrides})
    return target.structure().for_source(opened.reader.config, own)(opened, own, progress)


def allowed_candidates(config: dict[str, Any], settings: PlanSettings) -> Iterator[tuple[Target, Candidate]]:
    """Yield the candidates of every target that may be chosen, for the source of this config.json."""
    if settings.engine == TENSORRT_LLM:  # what it loads of conversions is not known
        return
    for target in TARGETS.working().values():
        if target.fixed or not settings.allows(target.name):
            continue
        candidates = named_candidates(target, config)
        # A structure that is nothing without bits has them in its name.
        coded = settings.allows(BITS) or all("bits" in each.settings for each in candidates)
        for candidate in candidates:
            if coded or "bits" not in candidate.settings:
                yield target, candidate


def named_candidates(target: Target, config: dict[str, Any]) -> list[Candidate]:
    """Return the candidates of a target; none where it needs heads and the source of this config.json is MLA."""
    structure = target.structure()
    if config["model_type"] in LATENT_FAMILIES and not structure.takes_latents:
        return []
    return structure.candidates(config)


def held_bytes(config: dict[str, Any], opened: Source, settings: PlanSettings) -> int:
    """Bytes that the caches of all sequences hold at the plan's context."""
    return kv_bytes_of(config, opened.weight_dtype)(settings.tokens, settings.batch)


def _named(target: Target, overrides: dict[str, Any]) -> str:
    flags = " ".join(f"--{name.replace('_', '-')} {_short(value)}" for name, value in overrides.items())
    return f"--to {target.name} {flags}".strip()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
