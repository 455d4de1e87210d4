"""Tiny random models of every class and every form of cache that the project writes, by name.

Tests of what every result must survive (loading, training, running) are parametrised over `WRITTEN`.
"""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from own_models import KINDS, LATENT, LAYERS, SHAPE, hybrid_entry, low_rank_entry, tiny_source, tokens
from picture_models import CONFIGS, prompt
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DeepseekV3Config, PreTrainedModel

from surgery.model import SurgeryConfig, SurgeryForCausalLM, SurgeryPicturesConfig
from surgery.model.token_quantizer import TokenQuantizer

INT8 = {"format": "int8", "group": 4, "window": 2, "keys": "token"}
INT4 = {"format": "int4", "group": 4, "window": 3, "keys": "channel"}
FP8 = {"format": "fp8", "group": 4, "window": 0, "keys": "token", "sinks": 1}
LATENT_ENTRY = {"kind": "latent", "kv_lora_rank": 12, "rope_inv_freq": [1.0, 0.1], "key_norm_eps": None}
ROWS = {"latent_runs": [["4+4", 2], ["2+2+2+2", 2]], "rope_runs": [["5+3", 2]], "first_tokens": 2}
ROWS_ENTRY = {**LATENT_ENTRY, "kind": "quantized_latent", **ROWS}
LATENT_ROWS = {"kind": "quantized_low_rank", "latent_runs": [["4+4", 4], ["3+3+2", 2]], "first_tokens": 2}
LOW_RANK_ROWS = {**low_rank_entry(14), **LATENT_ROWS}
CASCADE_ROWS = LOW_RANK_ROWS, {**LOW_RANK_ROWS, "shared_layers": 1, "shared_rank": 14}
HEAD_BLOCKS = [{"rank": 4 + 4 * head, "keys": [head], "values": []} for head in range(2)]
HEAD_BLOCKS += [{"rank": 4 + 2 * head, "keys": [], "values": [head]} for head in range(2)]
HEAD_RUNS = [["4+4", 2], ["2+2+2+2", 2], ["4+4", 2], ["3+3+2", 2]]
HEAD_ROWS = {**LOW_RANK_ROWS, "blocks": HEAD_BLOCKS, "latent_runs": HEAD_RUNS}
HEAD_PAIRS = [{"rank": 4 + 4 * head, "keys": [head], "values": [head]} for head in range(2)]
HEAD_PAIR_ROWS = {**LOW_RANK_ROWS, "blocks": HEAD_PAIRS, "latent_runs": [["4+4", 2], ["2+2+2+2", 2]]}
KEY_NORM_ENTRY = {**LATENT_ENTRY, "key_norm_eps": 1e-6}
MLA = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
DENSE_MLA = {**SHAPE, "num_key_value_heads": 4, **MLA, "intermediate_size": 48, "first_k_dense_replace": LAYERS}
IMAGES = "pictures"
"""Name of the vision-language model in `WRITTEN`, which takes a picture as well as tokens."""


@torch.no_grad()
def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to all parameters, so that outputs depend on each: lossless conversions have zeros in many."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    for module in model.modules():
        if isinstance(module, TokenQuantizer):
            module.step.fill_(0.2)
            module.mean.copy_(0.1 * torch.randn(module.mean.shape, generator=generator))
            if module.correcting:
                module.correction.copy_(0.3 * torch.randn(module.correction.shape, generator=generator))
    return model.eval()


@torch.no_grad()
def from_kind(kind: str, family: str = "llama") -> PreTrainedModel:
    """Make a model of `own_models.KINDS`."""
    return perturbed(KINDS[kind](tiny_source(family)))


@torch.no_grad()
def from_entries(*entries: dict[str, Any] | None, family: str = "llama", **settings: Any) -> PreTrainedModel:
    """Make a random model of the custom class; one entry for all layers, or one for each."""
    source = tiny_source(family)
    entries = [dict(entry) if entry else None for entry in (entries if len(entries) > 1 else entries * LAYERS)]
    config = SurgeryConfig.from_base(source.config, entries, experts_implementation="eager", **settings)
    torch.manual_seed(1)
    return perturbed(SurgeryForCausalLM(config))


@torch.no_grad()
def mla(entries: list[None] | None = None, **settings: Any) -> PreTrainedModel:
    """Make a random dense MLA: stock `deepseek_v3`, or the custom class around it if there are entries."""
    config = DeepseekV3Config(**DENSE_MLA)
    torch.manual_seed(1)
    if entries is None:
        return perturbed(AutoModelForCausalLM.from_config(config))
    return perturbed(SurgeryForCausalLM(SurgeryConfig.from_base(config, entries, **settings)))


@torch.no_grad()
def with_pictures(entry: dict[str, Any] | None = None) -> PreTrainedModel:
    """Make a random vision-language model whose decoder is converted."""
    source = CONFIGS["qwen3_vl"]()
    text = SurgeryConfig.from_base(source.text_config, [entry] * source.text_config.num_hidden_layers)
    config = {**source.to_dict(), "base_model_type": "qwen3_vl", "text_config": text.to_dict()}
    torch.manual_seed(1)
    return perturbed(AutoModelForImageTextToText.from_config(SurgeryPicturesConfig(**config)))


@torch.no_grad()
def fewer_heads() -> PreTrainedModel:
    """Make a stock Llama with one KV head."""
    return perturbed(tiny_source("llama", num_key_value_heads=1))


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    **{kind: partial(from_kind, kind) for kind in KINDS},
    "latent_key_norm": partial(from_kind, "latent", "qwen3"),
    "low_rank_key_norm": partial(from_kind, "low_rank", "qwen3"),
    "quantized_plain": partial(from_entries, None, kv_cache=INT4 | {"sinks": 1, "clip": True}),
    "quantized_latent": partial(from_entries, LATENT_ENTRY, kv_cache=INT8 | {"rope_format": "exact"}),
    "quantized_low_rank": partial(from_entries, low_rank_entry(), kv_cache=INT4),
    "quantized_codes": partial(
        from_entries, {**low_rank_entry(), "codes": [["int3", LATENT], ["int2", LATENT]]}, kv_cache=INT8 | {"group": 8}
    ),
    "quantized_window": partial(from_entries, low_rank_entry(window=3, sinks=2), kv_cache=INT8),
    "quantized_hybrid": partial(
        from_entries, hybrid_entry(1, [1, 0], sinks=2, recent=5), kv_cache=INT8 | {"streaming_format": "int4"}
    ),
    "quantized_mla": lambda: mla([None] * LAYERS, kv_cache=FP8),
    "rows_latent": partial(from_entries, ROWS_ENTRY),
    "rows_latent_predicted": partial(from_entries, {**ROWS_ENTRY, "predicts_values": True}),
    "rows_latent_key_norm": partial(from_entries, {**ROWS_ENTRY, "key_norm_eps": 1e-6}, family="qwen3"),
    "rows_heads": partial(from_entries, HEAD_ROWS),
    "rows_head_pairs": partial(from_entries, HEAD_PAIR_ROWS),
    "rows_shared": partial(from_entries, *CASCADE_ROWS, family="qwen3"),
    "mixed": partial(from_entries, LATENT_ENTRY, hybrid_entry(1, [1, 0], sinks=2, recent=5), kv_cache=[None, INT8]),
    IMAGES: partial(with_pictures, low_rank_entry()),
    "mla": mla,
    "fewer_heads": fewer_heads,
}


def copy_of(name: str) -> PreTrainedModel:
    """A model that a test may change; random numbers start from seed 1."""
    model = copy.deepcopy(_made(name))
    torch.manual_seed(1)
    return model


@cache
def _made(name: str) -> PreTrainedModel:
    return MAKERS[name]()


WRITTEN = {name: partial(copy_of, name) for name in MAKERS}
"""Makes a model by name: those of `own_models.KINDS` and the other kinds, quantized caches, stock classes."""

CUSTOM = [name for name in WRITTEN if name not in ("mla", "fewer_heads")]
"""Those of the custom model class."""

QUICK = ("latent", "low_rank", "window", "hybrid", "quantized_plain", "quantized_latent", "mixed")
"""Kinds on which slow tests run by default."""


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass of a model of `WRITTEN`."""
    return prompt("qwen3_vl") if name == IMAGES else {"input_ids": tokens()}
