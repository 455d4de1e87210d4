"""DeciLM (``nemotron-nas``): a Llama whose layers may have different numbers of KV heads, in vLLM and llama.cpp.

The tensors are Llama's. What the engines read of the config: vLLM ``model_executor/models/nemotron_nas.py`` (through a
config class with attributes, which has to travel with the checkpoint), llama.cpp ``convert_hf_to_gguf.py``
(``DeciModel``), both as of 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgery import model
from surgery.checkpoint.kv_widths import DECILM
from surgery.common.errors import SurgeryError

CONFIG_CODE = Path(model.__file__).with_name("configuration_decilm.py")
# Feed-forward widths are rounded up to a multiple of it.
WIDTH_MULTIPLE = 256


def check(source: dict[str, Any]) -> None:
    """Refuses what DeciLM cannot hold, or an engine would compute otherwise.

    Args:
        source: a config.json.

    Raises:
        SurgeryError: not a Llama, biases, heads of another width than ``hidden_size / num_attention_heads``, scaled
            rotations that llama.cpp would leave out, or a feed-forward width that is no multiple of 256.
    """
    problem = None
    head_dim = source["hidden_size"] / source["num_attention_heads"]
    rope = _rope(source)
    if source["model_type"] != "llama":
        problem = f"the source is a {source['model_type']!r}, DeciLM is a Llama"
    elif source.get("attention_bias") or source.get("mlp_bias"):
        problem = "the source has biases"
    elif (source.get("head_dim") or head_dim) != head_dim:
        problem = f"heads of {source['head_dim']} numbers, llama.cpp takes them to have {head_dim:g}"
    elif rope.get("rope_type", rope.get("type", "default")) not in ("default", "llama3"):
        problem = "llama.cpp reads no rotation of its kind but default and llama3"
    elif source["intermediate_size"] % WIDTH_MULTIPLE:
        problem = f"its feed-forward width {source['intermediate_size']} is no multiple of {WIDTH_MULTIPLE}"
    if problem:
        raise SurgeryError(f"--carrier decilm: {problem}; write --carrier own")


def config_with_heads(source: dict[str, Any], heads: Sequence[int]) -> dict[str, Any]:
    """The config.json of a Llama with so many KV heads by layer.

    Raises:
        SurgeryError: as :func:`check`.
    """
    check(source)
    blocks = [
        {
            "attention": {
                "n_heads_in_group": source["num_attention_heads"] // count,
                "no_op": False,
                "replace_with_linear": False,
            },
            "ffn": {"ffn_mult": _multiplier(source), "no_op": False, "replace_with_linear": False},
        }
        for count in heads
    ]
    config = {name: value for name, value in source.items() if name != "num_key_value_heads"}
    config |= {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": DECILM,
        "auto_map": {"AutoConfig": f"{CONFIG_CODE.stem}.DeciLMConfig"},
        "block_configs": blocks,
    }
    # llama.cpp looks for it here, not among the parameters of the rotation.
    if original := _rope(source).get("original_max_position_embeddings"):
        config["original_max_position_embeddings"] = original
    return config


def feed_forward_width(multiplier: float, hidden: int) -> int:
    """``2/3 · multiplier · hidden`` without its fraction, rounded up to a multiple of 256: the engines' rule."""
    return -(-int(2 * multiplier * hidden / 3) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _multiplier(source: dict[str, Any]) -> float:
    hidden, width = source["hidden_size"], source["intermediate_size"]
    multiplier = 1.5 * width / hidden
    if feed_forward_width(multiplier, hidden) != width:
        raise SurgeryError(f"--carrier decilm: no multiplier gives the feed-forward width {width}; write --carrier own")
    return multiplier


def _rope(source: dict[str, Any]) -> dict[str, Any]:
    return source.get("rope_parameters") or source.get("rope_scaling") or {}
