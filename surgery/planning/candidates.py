"""Candidate conversions of every structure, sized to shares of the source's KV bytes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.engines.table import refuse_unless_loadable
from surgery.families import LATENT_FAMILIES
from surgery.planning.settings import BITS, PlanSettings
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import Source
from surgery.structures.base import Candidate, Structure
from surgery.structures.context import ConversionContext
from surgery.structures.registry import TARGETS, Target

TOLERANCE = 0.02
"""Relative gap below the target share within which the search for a size stops."""
ATTEMPTS = 5
LEAST_RATIO = 0.01
SMALL_RATIOS = (LEAST_RATIO, 0.02, 0.04, 0.08)


@dataclass(frozen=True)
class Sized:
    """Candidate conversion with its size.

    Attributes:
        asked: settings of the conversion in addition to the plan's; ``settings`` are all.
        kv_bytes: KV bytes of all sequences at the plan's context.
        engines: each engine's verdict on the result.
        engine, status: always None, unlike those of an :class:`surgery.planning.engine_formats.EngineFormat`.
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
        """Name: the options of ``surgery convert``."""
        return _options_of(self.target, self.asked)

    @property
    def to(self) -> str:
        """Name of the target."""
        return self.target.name

    def command(self, called: str) -> str:
        """Return the command line of the conversion; ``called`` names the source in it."""
        return f"surgery convert {shlex.quote(called)} {self.name}"

    def leaves(self, layer: int) -> bool:
        """Return whether a layer stays unchanged."""
        return layer in self.structure.opened.fixed

    def group(self, layer: int) -> range:
        """Return the layers that must run together with this one."""
        return self.structure.group(layer)

    def attention(self, work: ConversionContext, layer: int) -> nn.Module:
        """Return the simulated attention of a converted layer."""
        return self.structure.closed_form(work, layer)

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Run hidden states [N, T, D], in place, through layers that must run together."""
        return self.structure.pass_group(work, group, hidden)


class Candidates:
    """Generator of sized candidates; ``refused`` has the reasons of others by name.

    ``work`` has the statistics of all layers and no held-out text, so that budgets are split over layers without
    measurements; None for a dry run, which does not split budgets.
    """

    def __init__(self, opened: Source, work: ConversionContext | None, settings: PlanSettings):
        self._opened, self._work, self._settings = opened, work, settings
        self._progress = Progress(silent=True) if work is None else work.progress
        self.refused: dict[str, str] = {}
        self.source_bytes = held_bytes(opened.reader.config, opened, settings)

    def at(self, shares: Sequence[float]) -> Iterator[Sized]:
        """Yield all candidates: scalable ones for each share of the source's bytes, others once."""
        configs = []  # different settings may give the same result
        for target, overrides, candidate in self._allowed():
            sizes = set()  # a structure may be unable to use a larger share
            for share in shares if candidate.scales else (None,):
                sized = self.sized(target, overrides, share)
                if sized and sized.kv_bytes not in sizes and sized.config not in configs:
                    sizes.add(sized.kv_bytes)
                    configs.append(sized.config)
                    yield sized

    def smallest(self) -> list[Sized]:
        """Return the scalable candidates, each at the smallest of `SMALL_RATIOS` that it takes."""
        results = []
        for target, overrides in [
            (target, overrides) for target, overrides, candidate in self._allowed() if candidate.scales
        ]:
            options = (self.sized(target, {"kv_ratio": ratio, **overrides}, None) for ratio in SMALL_RATIOS)
            results += filter(None, [next(filter(None, options), None)])
        return results

    def _allowed(self) -> Iterator[tuple[Target, dict[str, Any], Candidate]]:
        for target, candidate in allowed_candidates(self._opened.reader.config, self._settings):
            yield target, {**candidate.settings, **self._settings_for(target, candidate)}, candidate

    def sized(
        self, target: Target, overrides: dict[str, Any], share: float | None, *, record: bool = True
    ) -> Sized | None:
        """Size a candidate to at most a share of the source's bytes, or its own size; None if it is refused."""
        try:
            result = (
                self._create(target, overrides) if share is None else self._largest_within(target, overrides, share)
            )
            if result is None:
                return None
            if self._work is None:
                return result
            result.structure.plan(self._work)
            # The ranks are final only after `plan`; they decide the bytes of first tokens.
            config = result.structure.forecast().config
            return replace(result, config=config, kv_bytes=held_bytes(config, self._opened, self._settings))
        except SurgeryError as error:
            if record:
                self.refused[_options_of(target, overrides)] = str(error)
            return None

    def _largest_within(self, target: Target, overrides: dict[str, Any], share: float) -> Sized | None:
        """Search for the largest size within a share."""
        ratio, best, before = share, None, None
        for _ in range(ATTEMPTS):
            try:
                sized = self._create(target, {"kv_ratio": round(ratio, 4), **overrides})
            except SurgeryError:
                if best is None:
                    raise
                break
            ratio_of_source = sized.kv_bytes / self.source_bytes
            if ratio_of_source <= share and (best is None or sized.kv_bytes > best.kv_bytes):
                best = sized
            if (1 - TOLERANCE) * share <= ratio_of_source <= share:
                break
            # Bytes are affine in the ratio: full-precision tokens add a constant.
            slope = (
                ratio_of_source / ratio
                if before is None or before[0] == ratio
                else (ratio_of_source - before[1]) / (ratio - before[0])
            )
            before = ratio, ratio_of_source
            aim = share * (1 - TOLERANCE / 2)
            ratio = min(max(ratio + (aim - ratio_of_source) / slope if slope > 0 else ratio / 2, LEAST_RATIO), 0.99)
        return best

    def _create(self, target: Target, overrides: dict[str, Any]) -> Sized:
        structure = structure_of(target, overrides, self._opened, self._settings, self._progress)
        forecast = structure.forecast()
        config = forecast.config
        if self._settings.engine:
            refuse_unless_loadable(self._settings.engine, config)
        num_bytes = held_bytes(config, self._opened, self._settings)
        engines = forecast.engines_of(self._opened.reader, config)
        return Sized(target, overrides, structure.settings, structure, config, num_bytes, engines)

    def _settings_for(self, target: Target, candidate: Candidate) -> dict[str, Any]:
        """Return the plan's engine, heads and context, as far as this candidate has such settings."""
        # An engine determines the shapes of a stock class; whether it loads the custom class is checked on the result.
        stock = not candidate.settings.get("bits") and candidate.settings.get("carrier") != "own"
        heads = {"heads": self._settings.heads, "context": self._settings.tokens} if self._settings.heads else {}
        values = {"engine": self._settings.engine if stock else None, **heads}
        return {name: value for name, value in values.items() if value and hasattr(target.settings_class, name)}


def structure_of(
    target: Target, overrides: Mapping[str, Any], opened: Source, settings: PlanSettings, progress: Progress
) -> Structure:
    """Create the structure that converts a source with a plan's settings and a candidate's ``overrides``.

    Raises SurgeryError: the source does not support the conversion.
    """
    own = target.settings({**settings.common(), **overrides})
    return target.structure().for_source(opened.reader.config, own)(opened, own, progress)


def allowed_candidates(config: dict[str, Any], settings: PlanSettings) -> Iterator[tuple[Target, Candidate]]:
    """Yield the candidates of every target that the plan allows, for the source's config.json."""
    for target in TARGETS.working().values():
        if target.fixed or not settings.allows(target.name):
            continue
        for candidate in named_candidates(target, config):
            if settings.allows(BITS) or "bits" not in candidate.settings:
                yield target, candidate


def named_candidates(target: Target, config: dict[str, Any]) -> list[Candidate]:
    """Return a target's candidates for the source's config.json; empty if it needs KV heads and the source is MLA."""
    structure = target.structure()
    if config["model_type"] in LATENT_FAMILIES and not structure.takes_latents:
        return []
    return structure.candidates(config)


def held_bytes(config: dict[str, Any], opened: Source, settings: PlanSettings) -> int:
    """Compute the KV bytes of all sequences at the plan's context."""
    return kv_bytes_of(config, opened.weight_dtype)(settings.tokens, settings.batch)


def _options_of(target: Target, overrides: dict[str, Any]) -> str:
    flags = " ".join(f"--{name.replace('_', '-')} {_format_value(value)}" for name, value in overrides.items())
    return f"--to {target.name} {flags}".strip()


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
