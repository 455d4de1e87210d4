"""gpt-oss: learned sinks, biases, sliding windows in every other layer, YaRN; experts stay unchanged."""

from surgery.families.base import Family, layer_types_window

GPT_OSS = Family(
    model_type="gpt_oss", sinks=True, window=layer_types_window, experts=True, extra_parts="learned attention sinks"
)
