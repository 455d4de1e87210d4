"""The project's own model classes: any supported decoder with a converted attention in place of its own.

By itself, or inside of a model of pictures and text. Used where no stock class can carry a conversion. Their files
travel beside the weights, so that the checkpoint loads without this package; they import torch, transformers and each
other, nothing else.
"""

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from .configuration_surgery import SurgeryConfig
from .configuration_surgery_pictures import SurgeryPicturesConfig
from .family_decoders import DECODERS
from .latent_attention import LatentAttention
from .modeling_surgery import SurgeryForCausalLM
from .modeling_surgery_pictures import SurgeryForPicturesAndText

# What config.json has to say for `trust_remote_code=True` to find the classes in the files of `remote_code_files`.
AUTO_MAP = {
    "AutoConfig": "configuration_surgery.SurgeryConfig",
    "AutoModelForCausalLM": "modeling_surgery.SurgeryForCausalLM",
}
PICTURES_AUTO_MAP = {
    "AutoConfig": "configuration_surgery_pictures.SurgeryPicturesConfig",
    "AutoModelForImageTextToText": "modeling_surgery_pictures.SurgeryForPicturesAndText",
}
"""The same of a model of pictures and text."""


REMOTE_CODE = (
    "configuration_surgery",
    "modeling_surgery",
    "converted_decoder",
    "axis_decoder",
    "attention_choice",
    "attention_functions",
    "logit_factor",
    "latent_attention",
    "low_rank_attention",
    "up_projections",
    "grouped_attention",
    "cache_argument",
    "cache_layer",
    "growing",
    "step_memo",
    "left_padding",
    "quantization",
    "quantized_cache",
    "packed_rows",
    "straight_through",
    "exact_window_cache",
    "sink_window_cache",
    "hybrid_attention",
    "hybrid_cache",
    "token_codes",
    "cache_prediction",
    "cross_layer_attention",
    "cross_layer_latent_attention",
    "blockwise_decoder",
    "group_cache",
    "group_stores",
    "group_entries",
    "family_decoders",
)
PICTURES_CODE = ("configuration_surgery_pictures", "modeling_surgery_pictures")
"""Beside those, for a model of pictures and text."""


def register() -> None:
    """Make transformers' auto classes know the model classes; safe to call more than once."""
    AutoConfig.register(SurgeryConfig.model_type, SurgeryConfig, exist_ok=True)
    AutoConfig.register(SurgeryPicturesConfig.model_type, SurgeryPicturesConfig, exist_ok=True)
    AutoModelForCausalLM.register(SurgeryConfig, SurgeryForCausalLM, exist_ok=True)
    AutoModelForImageTextToText.register(SurgeryPicturesConfig, SurgeryForPicturesAndText, exist_ok=True)
    # From here on `save_pretrained` copies the files below beside the weights and writes the auto_map, so whatever
    # a trainer saves loads without this package too.
    SurgeryConfig.register_for_auto_class("AutoConfig")
    SurgeryForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    SurgeryPicturesConfig.register_for_auto_class("AutoConfig")
    SurgeryForPicturesAndText.register_for_auto_class("AutoModelForImageTextToText")


def remote_code_files(*, pictures: bool = False) -> list[Path]:
    """Return the files to copy beside the weights of a checkpoint whose config.json holds `AUTO_MAP`.

    With `pictures` those for `PICTURES_AUTO_MAP`.
    """
    folder = Path(__file__).parent
    return [folder / f"{name}.py" for name in (*REMOTE_CODE, *(PICTURES_CODE if pictures else ()))]


__all__ = [
    "AUTO_MAP",
    "DECODERS",
    "PICTURES_AUTO_MAP",
    "LatentAttention",
    "SurgeryConfig",
    "SurgeryForCausalLM",
    "SurgeryForPicturesAndText",
    "SurgeryPicturesConfig",
    "register",
    "remote_code_files",
]
