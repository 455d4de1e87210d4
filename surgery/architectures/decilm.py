"""DeciLM (``nemotron-nas``): a Llama with a number of KV heads per layer, supported by vLLM and llama.cpp.

The tensors are Llama's. Readers of the config, as of 2025: vLLM ``model_executor/models/nemotron_nas.py``, through a
config class whose code ships with the checkpoint, and llama.cpp ``convert_hf_to_gguf.py`` (``DeciModel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgery import model
from surgery.checkpoint.kv_widths import DECILM
from surgery.common.errors import SurgeryError

CONFIG_CODE = Path(model.__file__).with_name("configuration_decilm.py")
# Feed-forward widths are rounded up to a multiple of this.
WIDTH_MULTIPLE = 256


def check(source: dict[str, Any]) -> None:
    """Check that DeciLM can hold a model of this config.json, and that the engines compute it correctly.

    Raises SurgeryError: not a Llama, biases, a ``head_dim`` other than ``hidden_size / num_attention_heads``, RoPE
    scaling that llama.cpp would ignore, or a feed-forward width that is not a multiple of 256.
    """
    problem = None
    head_dim = source["hidden_size"] / source["num_attention_heads"]
    rope = _rope(source)
    if source["model_type"] != "llama":
        problem = f"the source is a {source['model_type']!r}, DeciLM holds llama only"
    elif source.get("attention_bias") or source.get("mlp_bias"):
        problem = "the source has biases"
    elif (source.get("head_dim") or head_dim) != head_dim:
        problem = f"head_dim is {source['head_dim']}, llama.cpp assumes {head_dim:g}"
    elif rope.get("rope_type", rope.get("type", "default")) not in ("default", "llama3"):
        problem = "llama.cpp supports only RoPE types default and llama3"
    elif source["intermediate_size"] % WIDTH_MULTIPLE:
        problem = f"its feed-forward width {source['intermediate_size']} is not a multiple of {WIDTH_MULTIPLE}"
    if problem:
        raise SurgeryError(f"--carrier decilm: {problem}; use --carrier own")


def config_with_heads(source: dict[str, Any], heads: Sequence[int]) -> dict[str, Any]:
    """Return the config.json of a Llama with ``heads`` KV heads per layer. Raises SurgeryError: see :func:`check`."""
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
    # llama.cpp reads it here, not from the RoPE parameters.
    if original := _rope(source).get("original_max_position_embeddings"):
        config["original_max_position_embeddings"] = original
    return config


def feed_forward_width(multiplier: float, hidden: int) -> int:
    """Compute ``int(2/3 · multiplier · hidden)`` rounded up to a multiple of 256, which is the engines' rule."""
    return -(-int(2 * multiplier * hidden / 3) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _multiplier(source: dict[str, Any]) -> float:
    hidden, width = source["hidden_size"], source["intermediate_size"]
    multiplier = 1.5 * width / hidden
    if feed_forward_width(multiplier, hidden) != width:
        raise SurgeryError(f"--carrier decilm: no multiplier gives the feed-forward width {width}; use --carrier own")
    return multiplier


def _rope(source: dict[str, Any]) -> dict[str, Any]:
    return source.get("rope_parameters") or source.get("rope_scaling") or {}
