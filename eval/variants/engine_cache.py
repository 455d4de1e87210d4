"""Quantized KV caches that inference engines offer without a conversion, by the engines' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import LongTensor
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.variants import kvarn_cache, llama_cpp_cache, oscar_cache, turboquant_cache
from surgery.eval.variants.cache_hook import NoVariant, check_model, refusals, windows_of
from surgery.eval.variants.coded_cache import CodedLayer, Coder, coded_cache
from surgery.eval.variants.kvarn_cache import kvarn_layers
from surgery.eval.variants.llama_cpp_cache import llama_cpp_layers
from surgery.eval.variants.nvfp4_cache import Nvfp4
from surgery.eval.variants.turboquant_cache import turboquant_layers
from surgery.eval.variants.vllm_cache import Fp8, Int4PerTokenHead, PerTokenHead

Layers = Callable[[PreTrainedConfig], Sequence[CodedLayer]]
"""Function from a config to cache layers, one per model layer."""


def _same_coder(coder: Coder) -> Layers:
    return lambda config: [CodedLayer(coder, coder) for _ in range(config.num_hidden_layers)]


FORMATS: dict[str, Layers] = {
    "fp8": _same_coder(Fp8()),
    "fp8_per_token_head": _same_coder(PerTokenHead("fp8")),
    "int8_per_token_head": _same_coder(PerTokenHead("int8")),
    "int4_per_token_head": _same_coder(Int4PerTokenHead()),
    "nvfp4": _same_coder(Nvfp4()),
    **{name: partial(llama_cpp_layers, name) for name in llama_cpp_cache.BITS},
    **{name: partial(turboquant_layers, name) for name in turboquant_cache.PRESETS},
    **{name: partial(kvarn_layers, name) for name in kvarn_cache.PRESETS},
}
"""Formats without calibration, by the engine's name."""

CALIBRATED = ("oscar_int2",)
"""Formats that are calibrated on text."""


def engine_cache(model: PreTrainedModel, format: str, tokens: LongTensor | None = None) -> PreTrainedModel:
    """Replace the KV cache of `model` by an emulation of an engine's format, calibrated on sequences [N, T] if needed.

    Raises:
        NoVariant: the format does not support the head sizes, or no layer has full attention.
        SurgeryError: the format is unknown, calibration tokens are missing, or the model is a variant already.
    """
    check_model(model, f"the cache {format}", windows_of(model.config))
    if format in CALIBRATED:
        if tokens is None:
            raise SurgeryError(f"format {format} needs calibration: pass tokens")
        with refusals(NoVariant):
            rotations = oscar_cache.oscar_rotations(model, tokens)
        layers, chunk = [oscar_cache.oscar_layer(*each) for each in rotations], oscar_cache.CHUNK
    elif format in FORMATS:
        layers = FORMATS[format](model.config.get_text_config(decoder=True))
        chunk = kvarn_cache.PRESETS[format][2] if format in kvarn_cache.PRESETS else 0
    else:
        raise SurgeryError(f"unknown cache format {format!r}; choose one of {', '.join([*FORMATS, *CALIBRATED])}")
    return coded_cache(model, f"the cache {format}", layers, chunk)
