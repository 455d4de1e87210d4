"""Tiny GGUF files, written with the gguf package as llama.cpp's converter would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tiny_models import DEMO, random_model
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama_bias": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    # transformers' loader knows no other width of qwen3's heads.
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=128, tie_word_embeddings=False),
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model in float32 with biases and norms that are not trivial."""
    return random_model(CONFIGS[name](), seed).eval()


def write_gguf(
    path: Path, model: PreTrainedModel, kind: str = "F32", *, tokenizer: bool = False, more=None, tensors=None
) -> Path:
    """Writes a model; vectors in F32 and, where it is quantized, one kind of matrix in Q8_0, as llama.cpp mixes types.

    Args:
        kind: GGML type of the matrices.
        tokenizer: write the demo model's, with a chat template.
        more: further metadata by key; numbers, strings and None, which leaves a key out.
        tensors: further tensors by name.
    """
    config = model.config
    arch = config.model_type
    values = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if arch == "qwen3":
        values |= {f"{arch}.attention.key_length": config.head_dim, f"{arch}.attention.value_length": config.head_dim}
    values |= more or {}
    writer = GGUFWriter(path, values.pop("general.architecture", arch))
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    if tokenizer:
        _add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            array = permuted(array, config.num_attention_heads)
        elif arch == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            array = permuted(array, config.num_key_value_heads)
        quantized = kind not in ("F32", "F16", "BF16")
        stored = "F32" if array.ndim == 1 else "Q8_0" if quantized and "down_proj" in name else kind
        _add_tensor(writer, gguf_name(name), array, stored)
    for name, array in (tensors or {}).items():
        _add_tensor(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter orders them."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, kind = name.rpartition(".")
    if module in outside:
        return f"{outside[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def _add_tensor(writer: GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    writer.add_tensor(name, quantize(np.ascontiguousarray(array), number), raw_dtype=number)


def _add_tokenizer(writer: GGUFWriter) -> None:
    document = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in document["added_tokens"]}
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}!")
