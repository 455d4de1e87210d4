"""Registration of the configs of the custom model classes with transformers' AutoConfig.

Not shipped with checkpoints: their `auto_map` names an entry module of `remote_code`.
"""

from transformers import AutoConfig

from .configuration_surgery import SurgeryConfig
from .configuration_surgery_pictures import SurgeryPicturesConfig


def register_configs() -> None:
    """Register the configs with AutoConfig, without loading the model classes; safe to call more than once."""
    for config_class in (SurgeryConfig, SurgeryPicturesConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        # From here on `save_pretrained` copies the code of the config next to the weights and writes the auto_map.
        config_class.register_for_auto_class("AutoConfig")
