"""gpt-oss: a learned sink logit for each head, biases, windows on every other layer, YaRN; experts pass through."""

from surgery.families.base import Family, layer_types_window

GPT_OSS = Family(
    model_type="gpt_oss",
    sinks=True,
    window=layer_types_window,
    experts=True,
    beside="a learned sink for each head",
)
