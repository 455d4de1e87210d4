"""The configurations of the custom model class, registered with transformers' AutoConfig.

Not for the checkpoints: their `auto_map` names an entry module of `remote_code`.
"""

from transformers import AutoConfig

from .configuration_surgery import SurgeryConfig
from .configuration_surgery_pictures import SurgeryPicturesConfig


def register_configs() -> None:
    """Make AutoConfig know the configurations, without the model classes; safe to call more than once."""
    for config_class in (SurgeryConfig, SurgeryPicturesConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        # `save_pretrained` copies the files of its class next to the weights and writes the auto_map.
        config_class.register_for_auto_class("AutoConfig")
