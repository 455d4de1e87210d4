"""Command R and Command R7B/A: LayerNorms, parallel attention and feed-forward layers, neighboring rotary pairs.

In the second version only sliding-window layers have RoPE.
"""

from surgery.families.base import Family, layer_types_window

PARALLEL = "attention and feed-forward layers in parallel, after one LayerNorm"

COHERE = Family(model_type="cohere", interleaved=True, layer_norm=True, extra_parts=PARALLEL)
COHERE2 = Family(
    model_type="cohere2",
    interleaved=True,
    layer_norm=True,
    rotates=lambda config, layer: config.layer_types[layer] == "sliding_attention",
    window=layer_types_window,
    extra_parts=PARALLEL,
)
