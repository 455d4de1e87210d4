"""The cache formats that an engine has without a conversion, as candidates of a plan.

The source runs with its keys and values as :mod:`surgery.eval.variants` stores them, on the texts on which conversions
are measured. All formats here are written before they are read, so one pass over a text is what decoding computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.engines.cache_formats import TENSORRT_LLM, CacheFormat, cache_formats
from surgery.engines.table import ASKED, verdicts
from surgery.engines.verdict import REFUSED
from surgery.eval.variants.cache_hook import beside_windows, bytes_of, refusals, windows_of
from surgery.eval.variants.coded_cache import CodedLayer, Exact
from surgery.eval.variants.engine_cache import FORMATS
from surgery.families import LATENT_FAMILIES
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import cached_heads, causal_attention, output
from surgery.model.cache_layer import CacheLayer, check_full_attention
from surgery.planning.settings import ENGINE, PlanSettings
from surgery.running.source import Source
from surgery.structures.context import ConversionContext
from surgery.structures.passing import source_anatomy

EXACT = Exact()


@dataclass(frozen=True)
class EngineFormat:
    """A cache format of the plan's engine, for the source as it is.

    Attributes:
        serve: command of the engine's server, without flags of the cache.
        layers: an empty cache layer of each of the model's; those with a window stay in full precision.
        skipped: other layers that the user has the engine leave in full precision.
    """

    engine: str
    format: CacheFormat
    serve: str
    opened: Source
    settings: PlanSettings
    layers: tuple[CacheLayer, ...]
    skipped: tuple[int, ...] = ()
    to = None

    @property
    def all_layers(self) -> range:
        """Indices of the model's layers."""
        return range(len(self.layers))

    @property
    def asked(self) -> dict[str, Any]:
        """Nothing: there is no conversion."""
        return {}

    @property
    def config(self) -> dict[str, Any]:
        """The source's config.json."""
        return self.opened.reader.config

    @property
    def engines(self) -> dict[str, dict]:
        """Nothing: it is the format of one."""
        return {}

    @property
    def status(self) -> str:
        """Kind of check that the arithmetic has passed."""
        return self.format.status

    @property
    def name(self) -> str:
        """For people."""
        skipped = f", layers {' '.join(map(str, self.skipped))} exact" if self.skipped else ""
        return f"{self.engine}: {self.format.name}{skipped}"

    @cached_property
    def kv_bytes(self) -> float:
        """Bytes of all sequences at the plan's context."""
        one = bytes_of(self.layers, self.opened.config, self.opened.weight_dtype)
        return self.settings.batch * one(self.settings.tokens)

    def command(self, called: str) -> str:
        """Command line that serves the source so."""
        skipped = [*map(str, self.skipped)]
        if len(self.full_attention) < len(self.layers):
            skipped.insert(0, "sliding_window")
        flag = f" --kv-cache-dtype-skip-layers {' '.join(skipped)}" if skipped else ""
        return f"{self.serve} {self.format.flags}{flag}"

    def leaves(self, layer: int) -> bool:
        """Return whether the engine keeps a layer in full precision."""
        return self._has_window(layer) or isinstance(self.layers[layer].key_coder, Exact)

    @property
    def full_attention(self) -> list[int]:
        """Layers without a window."""
        return [layer for layer in self.all_layers if not self._has_window(layer)]

    def _has_window(self, layer: int) -> bool:
        return self.layers[layer].is_sliding

    def group(self, layer: int) -> range:
        """The layer alone."""
        return range(layer, layer + 1)

    def attention(self, work: ConversionContext, layer: int) -> nn.Module:
        """The source's attention over the engine's cache."""
        return CodedAttention(source_anatomy(self.opened, layer), self.layers[layer])

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Raise: no layers are grouped."""
        raise NotImplementedError

    def skipping(self, layers: Sequence[int]) -> EngineFormat:
        """The same format with these layers in full precision."""
        layers = sorted(layer for layer in layers if not self._has_window(layer))
        caches = [CodedLayer(EXACT, EXACT) if index in layers else layer for index, layer in enumerate(self.layers)]
        return replace(self, layers=tuple(caches), skipped=tuple(layers))

    def filled(self, budget: float, order: Sequence[int]) -> EngineFormat | None:
        """Leave as many layers in full precision as a budget has room for; None where there is none.

        Args:
            budget: bytes.
            order: layers, the one that is worth it most first.
        """
        best = None
        for count in range(1, len(order)):
            larger = self.skipping(order[:count])
            if larger.kv_bytes > budget:
                break
            best = larger
        return best


class CodedAttention(nn.Module):
    """Attention over keys and values of an engine's format; prompts only.

    Args:
        anatomy: of full attention.
        cache: an empty layer, whose tokens are written before they are read.
    """

    def __init__(self, anatomy: AttentionAnatomy, cache: CodedLayer):
        super().__init__()
        self.anatomy, self.cache = anatomy, cache

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        queries, keys, values = cached_heads(self.anatomy, self.anatomy.project(hidden_states))
        attn_output = causal_attention(self.anatomy, queries, *self.cache.fresh().update(keys, values))
        return output(self.anatomy, attn_output.transpose(1, 2), hidden_states), None


def engine_formats(opened: Source, settings: PlanSettings, called: str, refused: dict[str, str]) -> list[EngineFormat]:
    """Formats of the plan's engine for a source.

    Args:
        called: the source, in commands.
        refused: gets the formats that are not weighed, each with the reason.
    """
    if settings.engine is None or not settings.allows(ENGINE):
        return []
    candidates = []
    try:
        formats = cache_formats(settings.engine)
        serve = _server(opened, settings.engine, called)
        with refusals():
            windows = windows_of(opened.config)
            check_full_attention(opened.config, "an engine's own format, as it is simulated,", windows)
    except SurgeryError as error:
        refused[f"{settings.engine}'s own cache"] = str(error)
        return []
    for each in formats:
        try:
            if windows and not each.skips_layers:
                raise SurgeryError(f"what {settings.engine} does with layers that have a window was not tried")
            with refusals():
                pairs = zip(FORMATS[each.keys](opened.config), FORMATS[each.values](opened.config), strict=True)
                coded = [CodedLayer(keys.key_coder, values.value_coder) for keys, values in pairs]
                layers = tuple(beside_windows(coded, windows))
                bytes_of(layers, opened.config, opened.weight_dtype)(1)  # refuses heads that the format cannot hold
            candidates.append(EngineFormat(settings.engine, each, serve, opened, settings, layers))
        except SurgeryError as error:
            refused[f"{settings.engine}: {each.name}"] = str(error)
    return candidates


def _server(opened: Source, engine: str, called: str) -> str:
    """Command of the engine's server for the source.

    Raises:
        SurgeryError: the engine does not load it, or it caches latents.
    """
    config = opened.reader.config
    if config["model_type"] in LATENT_FAMILIES:
        raise SurgeryError("its formats are simulated for keys and values of heads, not for MLA's latents")
    if engine == TENSORRT_LLM:
        return f"trtllm-serve {called}"
    verdict = next(each for each in verdicts(config, called) if each.engine in ASKED[engine])
    if verdict.status == REFUSED or verdict.command is None:
        raise SurgeryError(f"{verdict.engine} does not load the source, {verdict.reason}")
    return verdict.command
