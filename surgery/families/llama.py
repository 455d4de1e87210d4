"""Llama 1, 2, 3 and models of their class (optional biases, llama3 RoPE scaling, any head_dim), and near relatives.

Seed-OSS has biases; Arcee (AFM) has feed-forward layers without gates; ERNIE 4.5 (dense) and Helium have neighboring
rotary pairs; SmolLM3 has no RoPE in every fourth layer, and optional sliding windows.
"""

from surgery.families.base import Family, layer_types_window

LLAMA = Family(model_type="llama")
SEED_OSS = Family(model_type="seed_oss")
ARCEE = Family(model_type="arcee", extra_parts="feed-forward layers without gates")
ERNIE4_5 = Family(model_type="ernie4_5", interleaved=True)
HELIUM = Family(model_type="helium", interleaved=True)
SMOLLM3 = Family(
    model_type="smollm3",
    rotates=lambda config, layer: bool(config.no_rope_layers[layer]),  # 1 where a layer has RoPE
    window=layer_types_window,
)
