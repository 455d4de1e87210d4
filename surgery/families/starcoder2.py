"""StarCoder2: biases, LayerNorms, optional sliding window in all layers."""

from surgery.families.base import Family, uniform_window

STARCODER2 = Family(
    model_type="starcoder2", window=uniform_window, layer_norm=True, norm_eps="norm_epsilon", extra_parts="LayerNorms"
)
