"""Configuration of a vision-language model whose language model has converted attention.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from .configuration_surgery import IDENTITY_FIELDS, RUNTIME_FIELDS, SurgeryConfig, without_attention


class SurgeryPicturesConfig(PreTrainedConfig):
    r"""Configuration of a vision-language model: the source's, with a `SurgeryConfig` for its language model.

    Every other field of the source's config.json is an attribute under its own name, with the class's defaults filled
    in.

    Args:
        base_model_type (`str`, defaults to `"llava"`):
            `model_type` of the source model.
        text_config (`dict | SurgeryConfig`, *optional*):
            Config of the language model; its `base_model_type` is the source's `text_config.model_type`.
        vision_config (`dict | PreTrainedConfig`, *optional*):
            Config of the source's vision tower.
        kwargs:
            The other fields of the source's config.json.
    """

    model_type = "surgery_pictures"
    # Configs that modules of the model hold; those of the language model hold the source's text config.
    sub_configs: ClassVar[dict[str, type]] = {"vision_config": AutoConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    base_model_type: str = "llava"
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_config: dict[str, Any] | PreTrainedConfig | None = None

    def __post_init__(self, **kwargs):
        if self.base_model_type not in CONFIG_MAPPING:
            raise ValueError(f"base_model_type {self.base_model_type!r} is not supported by the installed transformers")
        if not isinstance(self.text_config, SurgeryConfig):
            self.text_config = SurgeryConfig(**(self.text_config or {}))
        runtime = {name: kwargs.pop(name) for name in (*RUNTIME_FIELDS, "auto_map") if name in kwargs}
        base = CONFIG_MAPPING[self.base_model_type](
            **{name: value for name, value in kwargs.items() if name not in IDENTITY_FIELDS},
            text_config=self.text_config.base_config(),
            vision_config=self.vision_config,
        )
        self.vision_config = base.vision_config
        own = {"base_model_type", "text_config", "vision_config", *IDENTITY_FIELDS}
        inherited = {name: value for name, value in base.to_dict().items() if name not in own}
        super().__post_init__(**inherited, **runtime)
        for name in inherited.keys() - self.__dict__.keys():
            setattr(self, name, inherited[name])
        for other, name in base.attribute_map.items():  # aliases that transformers reads
            setattr(self, other, getattr(base, name))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Build a config like transformers, but drop its `attn_implementation`; see `without_attention`."""
        return super().from_dict(without_attention(config_dict), **kwargs)

    def base_config(self) -> PreTrainedConfig:
        """Return the source's own configuration, as its class expects it."""
        own = {"base_model_type", "text_config", "vision_config", *IDENTITY_FIELDS}
        source = {name: value for name, value in self.to_dict().items() if name not in own}
        return CONFIG_MAPPING[self.base_model_type](
            **source,
            text_config=self.text_config.base_config(),
            vision_config=self.vision_config,
            attn_implementation=self._attn_implementation,
            experts_implementation=self._experts_implementation,
        )
