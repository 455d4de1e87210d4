"""Vision-language model with converted attention in its language model; the rest is the source class's own code.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING, GenerationMixin, PreTrainedModel

from .attention_functions import family_attention_class
from .configuration_surgery_pictures import SurgeryPicturesConfig
from .converted_decoder import ConvertedModel, convert_decoder, family_decoder_class
from .modeling_surgery import SurgeryForCausalLM


class SurgeryForConditionalGeneration(ConvertedModel, PreTrainedModel, GenerationMixin):
    """The source's vision-language model with converted attention, as set by `text_config.attention_layers`.

    Instances are also instances of the source's class. Tensors keep the source's names.
    """

    config_class = SurgeryPicturesConfig

    def __new__(cls, config: SurgeryPicturesConfig | None = None, *args, **kwargs):
        """Instantiate a combined subclass of the source's class; copies pass no config and have that class already."""
        if config is None:
            return super().__new__(cls)
        stock = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config.base_config())]
        return super().__new__(family_attention_class(cls, stock))

    def __init__(self, config: SurgeryPicturesConfig):
        text = config.text_config
        if text.attention_layers is None:
            raise ValueError("attention_layers is missing from text_config; this is not a converted model")
        self._take_attention(text, MODEL_MAPPING[type(text.base_config())])
        base = config.base_config()
        super().__init__(base)
        config._attn_implementation = base._attn_implementation
        self.config = config
        decoder = self.get_decoder()
        decoder_class = family_decoder_class(text.base_model_type, type(decoder))
        if decoder_class is not type(decoder):
            decoder = decoder_class(decoder.config)
            self.set_decoder(decoder)
        convert_decoder(decoder, text)
        self.post_init()


SurgeryForPicturesAndText = SurgeryForConditionalGeneration
"""Name in the `auto_map` of older checkpoints."""

__all__ = ["SurgeryForCausalLM", "SurgeryForConditionalGeneration"]
