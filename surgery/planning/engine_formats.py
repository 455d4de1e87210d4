"""An engine's own cache formats, which need no conversion, as candidates of a plan.

:mod:`surgery.eval.variants` simulates the formats: the source runs with quantized keys and values on the same texts as
conversions. These formats quantize tokens before attention reads them, so one forward pass equals decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.engines.cache_formats import CacheFormat, cache_formats
from surgery.engines.table import ASKED, verdicts_on
from surgery.engines.verdict import REFUSED
from surgery.eval.variants.cache_hook import bytes_of, refusals, windows_of, with_sliding_windows
from surgery.eval.variants.coded_cache import CodedLayer, Exact
from surgery.eval.variants.engine_cache import FORMATS
from surgery.families import LATENT_FAMILIES
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import cached_heads, causal_attention, output
from surgery.model.cache_layer import CacheLayer, check_full_attention
from surgery.planning.candidates import Sized
from surgery.planning.settings import ENGINE, PlanSettings
from surgery.running.source import Source
from surgery.structures.context import ConversionContext
from surgery.structures.passing import source_anatomy


@dataclass(frozen=True)
class EngineFormat:
    """Cache format of the plan's engine, for the unconverted source, with its server's command without cache flags.

    ``layers`` has an empty cache layer for each; those with sliding windows stay in full precision.
    """

    engine: str
    format: CacheFormat
    serve: str
    opened: Source
    settings: PlanSettings
    layers: tuple[CacheLayer, ...]
    to = None

    @property
    def asked(self) -> dict[str, Any]:
        """Empty: there is no conversion."""
        return {}

    @property
    def config(self) -> dict[str, Any]:
        """The source's config.json."""
        return self.opened.reader.config

    @property
    def engines(self) -> dict[str, dict]:
        """Empty: the format belongs to one engine."""
        return {}

    @property
    def status(self) -> str:
        """Kind of check that the simulated arithmetic has passed."""
        return self.format.status

    @property
    def name(self) -> str:
        """Display name, unique among the candidates."""
        return f"{self.engine}: {self.format.name}"

    @cached_property
    def kv_bytes(self) -> float:
        """KV bytes of all sequences at the plan's context."""
        one = bytes_of(self.layers, self.opened.config, self.opened.weight_dtype)
        return self.settings.batch * one(self.settings.tokens)

    def command(self, called: str) -> str:
        """Return the command line that serves the source with this format."""
        windowed = any(layer.is_sliding for layer in self.layers)
        return f"{self.serve} {self.format.flags}{' --kv-cache-dtype-skip-layers sliding_window' * windowed}"

    def leaves(self, layer: int) -> bool:
        """Return whether the engine keeps a layer in full precision."""
        return self.layers[layer].is_sliding or isinstance(self.layers[layer].key_coder, Exact)

    def group(self, layer: int) -> range:
        """Return the layer alone: layers run separately."""
        return range(layer, layer + 1)

    def attention(self, work: ConversionContext, layer: int) -> nn.Module:
        """Return the source's attention over the engine's cache format."""
        return CodedAttention(source_anatomy(self.opened, layer), self.layers[layer])


Weighed = Sized | EngineFormat
"""Candidate of a plan with known KV bytes: a conversion, or an engine's own cache format."""


class CodedAttention(nn.Module):
    """Full attention over keys and values in an engine's cache format, of an empty cache layer; prefill only."""

    def __init__(self, anatomy: AttentionAnatomy, cache: CodedLayer):
        super().__init__()
        self.anatomy, self.cache = anatomy, cache

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        queries, keys, values = cached_heads(self.anatomy, self.anatomy.project(hidden_states))
        attn_output = causal_attention(self.anatomy, queries, *self.cache.fresh().update(keys, values))
        return output(self.anatomy, attn_output.transpose(1, 2), hidden_states), None


def engine_formats(opened: Source, settings: PlanSettings, called: str, refused: dict[str, str]) -> list[EngineFormat]:
    """Return the cache formats of the plan's engine that the source supports; adds reasons of others to ``refused``."""
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
                raise SurgeryError(f"{settings.engine}'s cache formats are not supported for sliding-window layers")
            with refusals():
                pairs = zip(FORMATS[each.keys](opened.config), FORMATS[each.values](opened.config), strict=True)
                coded = [CodedLayer(keys.key_coder, values.value_coder) for keys, values in pairs]
                layers = tuple(with_sliding_windows(coded, windows))
                bytes_of(layers, opened.config, opened.weight_dtype)(1)  # raises for unsupported head dims
            candidates.append(EngineFormat(settings.engine, each, serve, opened, settings, layers))
        except SurgeryError as error:
            refused[f"{settings.engine}: {each.name}"] = str(error)
    return candidates


def _server(opened: Source, engine: str, called: str) -> str:
    """Return the command of the engine's server for the source.

    Raises SurgeryError: the engine does not load the source, or the source caches latents.
    """
    config = opened.reader.config
    if config["model_type"] in LATENT_FAMILIES:
        raise SurgeryError("cache formats are simulated for keys and values of heads; MLA latents are not supported")
    verdict = next(each for each in verdicts_on(opened.reader, called) if each.engine in ASKED[engine])
    if verdict.status == REFUSED or verdict.command is None:
        raise SurgeryError(f"{verdict.engine} does not load the source, {verdict.reason}")
    return verdict.command
