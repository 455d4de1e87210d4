"""Model families: one declarative file per family, which this module imports, and a registry by ``model_type``."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry
from surgery.common.setting import did_you_mean
from surgery.families.base import Family, head_shape
from surgery.families.latent_family import LatentFamily

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
BUILT_IN = {each.model_type: each for module in _MODULES for each in vars(module).values() if isinstance(each, Family)}
"""Every family that a file of this folder declares, by ``model_type``."""

LATENT_FAMILIES = {name: family for name, family in BUILT_IN.items() if isinstance(family, LatentFamily)}
"""Families with MLA attention, by ``model_type``."""

FAMILIES: Registry[Family] = Registry(
    "families", {name: family for name, family in BUILT_IN.items() if name not in LATENT_FAMILIES}, Family
)
"""Families with keys and values per head by ``model_type``, including plugins of installed packages."""

IN_8_BITS = "; use the 8-bit KV cache of its engine instead"
LATENTS = "it has MLA attention already"
CONVERTED = "surgery", "surgery_pictures"
"""Values of ``model_type`` in the custom model classes."""

NO_CACHE = "it has a recurrent state and no KV cache to make smaller"

WHY_NOT = {
    **dict.fromkeys(("gemma4", "gemma4_text"), f"its layers share caches and differ in their heads{IN_8_BITS}"),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), f"its keys have a weighted norm after RoPE{IN_8_BITS}"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma"), NO_CACHE),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), f"{LATENTS}, with a sparse-attention indexer{IN_8_BITS}"),
    **dict.fromkeys(("longcat_flash", "kimi_linear"), f"{LATENTS}, with two attentions or recurrent layers{IN_8_BITS}"),
    "kimi_k2": "transformers has no such class; its weights are DeepSeek-V3's, so set model_type to deepseek_v3",
}
"""Reasons why known families are not supported, and what to do instead, if anything, by ``model_type``."""

__all__ = [
    "FAMILIES",
    "LATENT_FAMILIES",
    "Family",
    "LatentFamily",
    "any_family_of",
    "family_around",
    "family_of",
    "head_shape",
    "latent_family_of",
]


def family_of(config: dict) -> Family:
    """Return the family of a parsed config.json.

    Raises SurgeryError: an unknown model type, or weights that are quantized.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES and model_type in LATENT_FAMILIES:
        raise SurgeryError(
            f"config.json: model_type {model_type!r} has MLA attention already; --to mla makes its latents smaller; "
            "other targets need attention with keys and values per head"
        )
    return _lookup(config, FAMILIES)


def latent_family_of(config: dict) -> LatentFamily:
    """Return the MLA family of a parsed config.json.

    Raises SurgeryError: an unknown model type, or weights that are quantized.
    """
    return _lookup(config, LATENT_FAMILIES)


def any_family_of(config: dict) -> Family:
    """Return the family of a parsed config.json, with per-head attention or MLA.

    Raises SurgeryError: an unknown model type, or weights that are quantized.
    """
    return _lookup(config, {**FAMILIES, **LATENT_FAMILIES})


def family_around(model_type: str) -> Family | None:
    """Return the family of a model type, with per-head attention or MLA; None if unknown."""
    return FAMILIES.get(model_type) or LATENT_FAMILIES.get(model_type)


def _lookup(config: dict, families: Mapping[str, Family]) -> Family:
    model_type = config.get("model_type")
    if model_type in CONVERTED:
        raise SurgeryError("config.json: its attention is converted already; convert its source")
    if model_type not in families and model_type in WHY_NOT:
        raise SurgeryError(f"config.json: model_type {model_type!r} is not supported: {WHY_NOT[model_type]}")
    if model_type not in families:
        hint = did_you_mean(str(model_type), list(families))
        raise SurgeryError(
            f"config.json: model_type {model_type!r} is not supported{hint}; docs/families.md lists the families, and "
            "CONTRIBUTING.md tells how to add one"
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        remedy = "convert the unquantized checkpoint instead"
        if method == "mxfp4":  # the only format that gpt-oss is published in
            remedy = (
                "load them in transformers with quantization_config=Mxfp4Config(dequantize=True) and dtype bfloat16, "
                "save_pretrained(folder, save_original_format=False), and convert that"
            )
        raise SurgeryError(f"config.json: the weights are quantized ({method}); {remedy}")
    return families[model_type]
