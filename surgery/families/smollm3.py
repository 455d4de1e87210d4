"""SmolLM3: Llama without RoPE in every fourth layer; optional sliding windows."""

from surgery.families.base import Family, layer_types_window

SMOLLM3 = Family(
    model_type="smollm3",
    rotates=lambda config, layer: bool(config.no_rope_layers[layer]),  # 1 where a layer has RoPE
    window=layer_types_window,
)
