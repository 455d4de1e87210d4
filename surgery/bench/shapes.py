"""Shapes of real models, for checkpoints and models with random weights; free of torch imports."""

from __future__ import annotations

from surgery.checkpoint.location import existing, find_local
from surgery.common.errors import SurgeryError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, rope: dict) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "rope_parameters": rope,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


_DENSE = {
    "llama3-8b": _llama(4096, 32, 32, 8, 14_336, 128_256, LLAMA3_ROPE),
    "llama2-7b": _llama(4096, 32, 32, 32, 11_008, 32_000, {"rope_type": "default", "rope_theta": 10_000.0}),
    "llama3-70b": _llama(8192, 80, 64, 8, 28_672, 128_256, LLAMA3_ROPE),
    "llama3-405b": _llama(16_384, 126, 128, 8, 53_248, 128_256, LLAMA3_ROPE),
    "llama3-1b": _llama(2048, 16, 32, 8, 8192, 128_256, LLAMA3_ROPE),
}

SHAPES = {
    **_DENSE,
    "mixtral-8x7b": {
        **_llama(4096, 32, 32, 8, 14_336, 32_000, {"rope_type": "default", "rope_theta": 1_000_000.0}),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}

TINY = {
    "tiny": {
        **_DENSE["llama3-1b"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 128,
        "dtype": "float32",
    }
}
"""Shapes for smoke tests on machines without a GPU."""

DECODE_SHAPES = {**_DENSE, **TINY}


def is_shape(name: str) -> bool:
    """Return whether a name is one of `DECODE_SHAPES`, and not the folder or GGUF file of a checkpoint.

    Raises SurgeryError: the name is neither.
    """
    if existing(name) is not None:
        find_local(name)
        return False
    if name not in DECODE_SHAPES:
        raise SurgeryError(f"{name}: not a folder or a known shape; choose from {', '.join(DECODE_SHAPES)}")
    return True
