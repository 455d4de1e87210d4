"""Nemotron-4, Minitron: half of each head is rotated, LayerNorms with weights of 1 + w. Jais 2: LayerNorms, biases."""

from surgery.families.base import Family

UNGATED = "LayerNorms, and feed-forward layers without gates"

NEMOTRON = Family(
    model_type="nemotron",
    partial=True,
    layer_norm=True,
    norm_eps="norm_eps",
    norm_offset=1.0,
    forwards_kwargs=False,
    extra_parts=UNGATED,
)
JAIS2 = Family(model_type="jais2", layer_norm=True, extra_parts=UNGATED)
