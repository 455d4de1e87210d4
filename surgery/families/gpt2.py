"""GPT-2: learned positions added to the embeddings, so no RoPE; LayerNorms, biases, no gates."""

from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.size_names import SIZE_NAMES, with_size_names
from surgery.families.base import Family
from surgery.families.renamed import Renamed, whole


def _config(config: dict[str, Any]) -> dict[str, Any]:
    for name, plain in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.get(name, plain) is not plain:
            raise SurgeryError(f"config.json: {name} must be {plain} for gpt2, not {config[name]!r}")
    if config.get("add_cross_attention"):
        raise SurgeryError("config.json: add_cross_attention is not supported")
    config = with_size_names(config)
    for name in SIZE_NAMES.values():
        whole(config, name)
    return {
        **config,
        "num_key_value_heads": config["num_attention_heads"],
        "intermediate_size": config.get("n_inner") or 4 * config["hidden_size"],
        "layer_norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


GPT2 = Family(
    model_type="gpt2",
    rotates=lambda config, layer: False,
    layer_norm=True,
    extra_parts="learned position embeddings, LayerNorms, and feed-forward layers without gates",
    renamed=Renamed(
        names={
            r"^transformer\.": "",
            r"^(?!lm_head\.)": "model.",
            r"^model\.wte\.": "model.embed_tokens.",
            r"^model\.wpe\.": "model.embed_positions.",
            r"^model\.ln_f\.": "model.norm.",
            r"^model\.h\.": "model.layers.",
            r"\.ln_1\.": ".input_layernorm.",
            r"\.ln_2\.": ".post_attention_layernorm.",
            r"\.attn\.c_attn\.": ".self_attn.qkv_proj.",
            r"\.attn\.c_proj\.": ".self_attn.o_proj.",
        },
        buffers=r"\.attn\.(bias|masked_bias)$",
        config=_config,
        transposed=True,
    ),
)
