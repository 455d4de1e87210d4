"""Layers of several candidates in one model: what it is called, asked for by, and holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surgery.architectures.own_class import layer_entries, own_config
from surgery.common.errors import SurgeryError
from surgery.engines import engine_table, refuse_unless_loadable
from surgery.planning.candidates import Sized, held_bytes
from surgery.planning.measure import Line
from surgery.planning.settings import PlanSettings
from surgery.running.skeleton import skeleton
from surgery.running.source import Source
from surgery.structures.registry import MIXED, Target


@dataclass(frozen=True)
class Mixture:
    """A model of layers of candidates, as rows of a plan tell it; see :class:`surgery.planning.candidates.Sized`.

    Attributes:
        line: of every layer the candidate that it is of, None where it stays.
    """

    line: tuple[Sized | None, ...]
    config: dict[str, Any]
    kv_bytes: float
    engines: dict[str, dict]
    target: Target = MIXED

    @classmethod
    def of(cls, line: Line, opened: Source, settings: PlanSettings) -> Mixture | None:
        """None where the engine that is asked for does not take it."""
        source = opened.reader.config
        entries = [layer_entries(item.config if item else source)[layer] for layer, item in enumerate(line)]
        codes = [item.config.get("kv_cache") if item else None for item in line]
        config = own_config(source, entries, **({"kv_cache": codes} if any(codes) else {}))
        if settings.engine:
            try:
                refuse_unless_loadable(settings.engine, config)
            except SurgeryError:
                return None
        return cls(tuple(line), config, held_bytes(config, opened, settings), engine_table(config))

    def over(self, layers: int) -> Line:
        """What every layer is of."""
        return self.line

    @property
    def asked(self) -> dict[str, Any]:
        """Settings of the target."""
        parts = [{"to": item.target.name, "layers": layers, **item.asked} for item, layers in self._parts if item]
        return {"parts": parts, "keep": next((layers for item, layers in self._parts if item is None), [])}

    @property
    def name(self) -> str:
        """For people: how many layers become what."""
        named = [
            f"{len(layers)} x {item.name.removeprefix('--to ') if item else 'kept'}" for item, layers in self._parts
        ]
        return f"{self.target.name}: {', '.join(named)}"

    @property
    def _parts(self) -> list[tuple[Sized | None, list[int]]]:
        """Candidates, and their layers, most first."""
        layers: dict[int, list[int]] = {}
        for layer, item in enumerate(self.line):
            layers.setdefault(id(item), []).append(layer)
        parts = [(self.line[where[0]], where) for where in layers.values()]
        return sorted(parts, key=lambda part: (part[0] is None, -len(part[1]), part[1]))


def layer_bytes(config: dict[str, Any], opened: Source, settings: PlanSettings) -> list[int]:
    """Of every layer of a model of the own class, all sequences at the plan's context."""
    return skeleton(config, opened.weight_dtype).kv_layer_bytes(settings.batch, settings.tokens)
