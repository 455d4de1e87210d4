"""GPT-NeoX and Pythia: partial rotation, LayerNorms, biases; parallel attention and feed-forward layers.

One matrix holds each head's query, key and value rows together, and module names differ from Llama's.
"""

from typing import Any

from surgery.families.base import Family
from surgery.families.renamed import Renamed, whole


def _config(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "num_key_value_heads": whole(config, "num_attention_heads")}


GPT_NEOX = Family(
    model_type="gpt_neox",
    partial=True,
    layer_norm=True,
    extra_parts="LayerNorms, and feed-forward layers without gates",
    renamed=Renamed(
        names={
            r"^embed_out\.": "lm_head.",
            r"^gpt_neox\.embed_in\.": "model.embed_tokens.",
            r"^gpt_neox\.final_layer_norm\.": "model.norm.",
            r"^gpt_neox\.": "model.",
            r"\.attention\.query_key_value\.": ".self_attn.qkv_proj.",
            r"\.attention\.dense\.": ".self_attn.o_proj.",
        },
        buffers=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
        config=_config,
        by_head=True,
    ),
)
