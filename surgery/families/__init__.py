"""Model families: one short declarative file each, and the registry that finds one for a config."""

from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry
from surgery.families.base import Family, head_shape
from surgery.families.cohere import COHERE, COHERE2
from surgery.families.gemma3 import GEMMA3_TEXT
from surgery.families.glm import GLM, GLM4
from surgery.families.granite import GRANITE
from surgery.families.llama import LLAMA
from surgery.families.ministral import MINISTRAL
from surgery.families.mistral import MISTRAL
from surgery.families.mixtral import MIXTRAL
from surgery.families.qwen2 import QWEN2
from surgery.families.qwen3 import QWEN3
from surgery.families.qwen3_moe import QWEN3_MOE
from surgery.families.seed_oss import SEED_OSS
from surgery.families.smollm3 import SMOLLM3
from surgery.families.stablelm import STABLELM

BUILT_IN = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, MINISTRAL, SMOLLM3, GRANITE, SEED_OSS),
    *(GLM, GLM4, COHERE, COHERE2, STABLELM, GEMMA3_TEXT),
)

FAMILIES: Registry[Family] = Registry("families", {family.model_type: family for family in BUILT_IN})
"""By ``model_type``, those of installed packages among them."""

__all__ = ["FAMILIES", "Family", "family_of", "head_shape"]


def family_of(config: dict) -> Family:
    """The family of a parsed config.json.

    Raises:
        SurgeryError: an unknown model type, or weights that are quantised.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise SurgeryError(
            f"config.json: model_type {model_type!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise SurgeryError(
            f"config.json: the weights are quantised ({method}); convert the unquantised checkpoint instead"
        )
    return FAMILIES[model_type]
