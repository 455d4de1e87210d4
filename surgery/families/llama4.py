"""Llama 4, text: three layers in four have RoPE and chunked attention, with an unweighted RMS norm after RoPE.

RoPE preserves norms, so this equals a q/k-norm before it. These layers stay unchanged: their caches are bounded by the
chunk size. The remaining layers have full attention without RoPE and norm, and scale queries by position.
"""

from surgery.common.errors import SurgeryError
from surgery.families.base import Family


def _rotates(config, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # 1 where a layer has RoPE


def _chunk(config, layer: int) -> int | None:
    """Return the chunk size, which bounds the cache; in texts of one chunk it equals a window."""
    chunked = config.layer_types[layer] == "chunked_attention"
    if _rotates(config, layer) and not chunked:
        raise SurgeryError(f"config.json: layer {layer} of llama4_text must not have RoPE with full attention")
    return config.attention_chunk_size if chunked else None


def _first_scaled(config) -> int | None:
    """Return the first position in a second chunk or with a query scaled by 1 + α log(1 + ⌊(p + 1) / floor_scale⌋)."""
    limits = [config.attention_chunk_size] * ("chunked_attention" in config.layer_types)
    limits += [config.floor_scale - 1] * bool(config.attn_temperature_tuning)
    return min(limits, default=None)


def _expert_layers(single, config, layer: int) -> None:
    single.moe_layers = [0] if layer in config.moe_layers else []


LLAMA4_TEXT = Family(
    model_type="llama4_text",
    interleaved=True,
    rotates=_rotates,
    unit_norm=lambda config, layer: bool(config.use_qk_norm) and _rotates(config, layer),
    stays=_rotates,
    window=_chunk,
    first_scaled=_first_scaled,
    experts=True,
    expert_layers=_expert_layers,
    extra_parts="position-dependent query scaling",
)
