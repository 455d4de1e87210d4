"""Families whose checkpoints are another family's with fused projections (``qkv_proj``, ``gate_up_proj``).

They are read under that family's names and config, and so convert to every target that it converts to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.common.errors import SurgeryError


@dataclass(frozen=True)
class FusedFamily:
    """Family with fused projections, read as another family by a translated config.json.

    ``parts`` returns from its config.json, per fused module, the names and row counts of its parts in order.
    """

    config: Callable[[dict[str, Any]], dict[str, Any]]
    parts: Callable[[dict[str, Any]], Mapping[str, Mapping[str, int]]]


_SIZES = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_size")


def _phi3_config(config: dict[str, Any]) -> dict[str, Any]:
    """Translate a Phi-3 config to Llama's, to Mistral's if windowed, to GLM-4.5's without experts if partly rotated."""
    for name in _SIZES:
        _whole(config, name)
    rope = _phi3_rope(config)
    limit = _whole(config, "max_position_embeddings", 4096)
    window = _whole(config, "sliding_window", limit)
    windowed, partial = window < limit, rope["partial_rotary_factor"] != 1.0
    if windowed and partial:
        raise SurgeryError("config.json: phi3 with a sliding window and partial rotation is not supported")
    names = ("mistral", "Mistral") if windowed else ("glm4_moe", "Glm4Moe") if partial else ("llama", "Llama")
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
        "max_position_embeddings initializer_range use_cache bos_token_id eos_token_id dtype torch_dtype "
        "attention_dropout"
    )
    return {
        "architectures": [f"{names[1]}ForCausalLM"],
        "model_type": names[0],
        **{name: config[name] for name in fields.split() if name in config},
        "pad_token_id": config.get("pad_token_id"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_parameters": rope if partial else {k: v for k, v in rope.items() if k != "partial_rotary_factor"},
        **({"sliding_window": window} if windowed else {}),
        **({"first_k_dense_replace": config["num_hidden_layers"], "num_nextn_predict_layers": 0} if partial else {}),
    }


def _phi3_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Translate the RoPE fields of a Phi-3 config to ``rope_parameters``."""
    entry = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = entry.get("rope_type", entry.get("type", "default"))
    part = entry.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rope = {
        "rope_type": "longrope" if kind in ("su", "yarn") else kind,  # names of longrope in early Phi-3 configs
        "rope_theta": entry.get("rope_theta", config.get("rope_theta", 10_000.0)),
        "partial_rotary_factor": part,
    }
    if kind == "default":
        return rope
    names = "short_factor", "long_factor", "attention_factor", "factor"
    factors = {name: entry[name] for name in names if name in entry}
    before = entry.get("original_max_position_embeddings", config.get("original_max_position_embeddings", 4096))
    return {**rope, **factors, "original_max_position_embeddings": before}


def _whole(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if type(value) is not int:
        raise SurgeryError(f"config.json: {name} of {config['model_type']} must be an integer, not {value!r}")
    return value


def _phi3_parts(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    _, heads, width, hidden = (_whole(config, name) for name in _SIZES)
    head_dim = hidden // heads
    keys = _whole(config, "num_key_value_heads", heads) * head_dim
    return {
        "self_attn.qkv_proj": {
            "self_attn.q_proj": heads * head_dim,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": keys,
        },
        "mlp.gate_up_proj": {"mlp.gate_proj": width, "mlp.up_proj": width},
    }


def _internlm3_config(config: dict[str, Any]) -> dict[str, Any]:
    """Translate an InternLM3 config to Llama's, which has other names for the bias settings."""
    biases = {name: bool(config.get(name, config.get(old))) for name, old in _BIASES.items()}
    if biases["attention_bias"] != biases["mlp_bias"]:
        raise SurgeryError("config.json: qkv_bias and bias must be equal for internlm3")
    fields = {name: value for name, value in config.items() if name not in (*_BIASES.values(), "auto_map")}
    return {**fields, **biases, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


_BIASES = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}

FUSED: dict[str, FusedFamily] = {
    "phi3": FusedFamily(_phi3_config, _phi3_parts),
    "internlm3": FusedFamily(_internlm3_config, lambda config: {}),
}
"""Fused families by ``model_type``: Phi-3 and Phi-4, and InternLM3, which differs in names of settings only."""
