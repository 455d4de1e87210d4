"""The custom model classes with all of their modules, and their registration with transformers' auto classes.

Not shipped with checkpoints: their `auto_map` names an entry module of `remote_code`.
"""

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from .auto_config import register_configs
from .causal_model import SurgeryForCausalLM
from .configuration_surgery import SurgeryConfig
from .configuration_surgery_pictures import SurgeryPicturesConfig
from .family_decoders import DECODERS
from .latent_attention import LatentAttention
from .modeling_surgery_pictures import SurgeryForConditionalGeneration
from .remote_code import PICTURES_AUTO_MAP, auto_map, entry_class, remote_code_files

SurgeryForCausalLM.entry_class = staticmethod(entry_class)


def register() -> None:
    """Register configs and model classes with transformers' auto classes; safe to call more than once."""
    register_configs()
    AutoModelForCausalLM.register(SurgeryConfig, SurgeryForCausalLM, exist_ok=True)
    AutoModelForImageTextToText.register(SurgeryPicturesConfig, SurgeryForConditionalGeneration, exist_ok=True)
    # From here on `save_pretrained` copies a model's entry module and its imports next to the weights and writes the
    # auto_map, so that checkpoints of a trainer load without this package too.
    SurgeryForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    SurgeryForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")


__all__ = [
    "DECODERS",
    "PICTURES_AUTO_MAP",
    "LatentAttention",
    "SurgeryConfig",
    "SurgeryForCausalLM",
    "SurgeryForConditionalGeneration",
    "SurgeryPicturesConfig",
    "auto_map",
    "register",
    "remote_code_files",
]
