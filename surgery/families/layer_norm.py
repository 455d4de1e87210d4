"""Families with LayerNorms around Llama's attention.

StarCoder2 has biases and an optional sliding window in all layers, Jais 2 has biases. StableLM rotates a quarter of
each head, Nemotron (version 4, Minitron) a half, and its LayerNorms have weights of 1 + w.
"""

from surgery.families.base import Family, uniform_window

UNGATED = "LayerNorms, and feed-forward layers without gates"

JAIS2 = Family(model_type="jais2", layer_norm=True, extra_parts=UNGATED)
NEMOTRON = Family(
    model_type="nemotron",
    partial=True,
    layer_norm=True,
    norm_eps="norm_eps",
    norm_offset=1.0,
    extra_parts=UNGATED,
)
STABLELM = Family(model_type="stablelm", partial=True, layer_norm=True, extra_parts="LayerNorms")
STARCODER2 = Family(
    model_type="starcoder2", window=uniform_window, layer_norm=True, norm_eps="norm_epsilon", extra_parts="LayerNorms"
)
