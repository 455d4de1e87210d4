"""Model families: one declarative file per family, and a registry by ``model_type``."""

from collections.abc import Mapping

from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry
from surgery.families.apertus import APERTUS
from surgery.families.arcee import ARCEE
from surgery.families.base import Family, head_shape
from surgery.families.cohere import COHERE, COHERE2
from surgery.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from surgery.families.dots1 import DOTS1
from surgery.families.ernie4_5 import ERNIE4_5
from surgery.families.gemma import GEMMA
from surgery.families.gemma2 import GEMMA2
from surgery.families.gemma3 import GEMMA3_TEXT
from surgery.families.glm import GLM, GLM4
from surgery.families.glm4_moe import GLM4_MOE
from surgery.families.glm4_moe_lite import GLM4_MOE_LITE
from surgery.families.gpt2 import GPT2
from surgery.families.gpt_neox import GPT_NEOX
from surgery.families.gpt_oss import GPT_OSS
from surgery.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from surgery.families.helium import HELIUM
from surgery.families.latent_family import LatentFamily
from surgery.families.llama import LLAMA
from surgery.families.llama4 import LLAMA4_TEXT
from surgery.families.minicpm3 import MINICPM3
from surgery.families.ministral import MINISTRAL, MINISTRAL3
from surgery.families.mistral import MISTRAL
from surgery.families.mistral4 import MISTRAL4
from surgery.families.mixtral import MIXTRAL
from surgery.families.nemotron import JAIS2, NEMOTRON
from surgery.families.olmo import OLMO2, OLMO3
from surgery.families.qwen2 import QWEN2
from surgery.families.qwen3 import QWEN3
from surgery.families.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from surgery.families.qwen3_moe import QWEN2_MOE, QWEN3_MOE
from surgery.families.qwen_vl import QWEN2_5_VL_TEXT, QWEN3_VL_MOE_TEXT, QWEN3_VL_TEXT
from surgery.families.seed_oss import SEED_OSS
from surgery.families.smollm3 import SMOLLM3
from surgery.families.stablelm import STABLELM
from surgery.families.starcoder2 import STARCODER2
from surgery.families.youtu import YOUTU

BUILT_IN = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, MINISTRAL, SMOLLM3, GRANITE, SEED_OSS),
    *(GLM, GLM4, COHERE, COHERE2, STABLELM, GEMMA2, GEMMA3_TEXT, OLMO2, OLMO3, GPT_OSS),
    *(QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, MINISTRAL3, LLAMA4_TEXT),
    *(GPT_NEOX, GPT2, GLM4_MOE, GRANITE_HYBRID, STARCODER2, GEMMA),
    *(QWEN2_5_VL_TEXT, QWEN3_VL_TEXT, QWEN3_VL_MOE_TEXT),
    *(APERTUS, ARCEE, DOTS1, ERNIE4_5, GRANITE_MOE, HELIUM, JAIS2, NEMOTRON, QWEN2_MOE),
)

FAMILIES: Registry[Family] = Registry("families", {family.model_type: family for family in BUILT_IN}, Family)
"""Families by ``model_type``, including plugins of installed packages."""

LATENT_FAMILIES: dict[str, LatentFamily] = {
    family.model_type: family for family in (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3, MISTRAL4, YOUTU)
}
"""Families with MLA attention, by ``model_type``."""

IN_8_BITS = "; use the 8-bit KV cache of its engine instead"
LATENTS = "it has MLA attention already"
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

    Raises:
        SurgeryError: an unknown model type, or weights that are quantized.
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

    Raises:
        SurgeryError: an unknown model type, or weights that are quantized.
    """
    return _lookup(config, LATENT_FAMILIES)


def any_family_of(config: dict) -> Family:
    """Return the family of a parsed config.json, with per-head attention or MLA.

    Raises:
        SurgeryError: an unknown model type, or weights that are quantized.
    """
    return _lookup(config, {**FAMILIES, **LATENT_FAMILIES})


def family_around(model_type: str) -> Family | None:
    """Return the family of a model type, with per-head attention or MLA; None if unknown."""
    return FAMILIES.get(model_type) or LATENT_FAMILIES.get(model_type)


def _lookup(config: dict, families: Mapping[str, Family]) -> Family:
    model_type = config.get("model_type")
    if model_type not in families and model_type in WHY_NOT:
        raise SurgeryError(f"config.json: model_type {model_type!r} is not supported: {WHY_NOT[model_type]}")
    if model_type not in families:
        raise SurgeryError(
            f"config.json: model_type {model_type!r} is not supported (supported: {', '.join(families)})"
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
