"""Hugging Face view of a GGUF file: config.json, tensor names, order of rows, dtype.

Names and metadata keys are those of llama.cpp's converter, which also rewrites two things: rows of q and k of ``llama``
models are permuted for rotations of neighboring numbers, and llama3's RoPE scaling is stored as a tensor of factors.
Both are undone. Mistral's files are ``llama`` ones and become Llama checkpoints, which compute the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.checkpoint.config_file import check_sizes
from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.gguf_header import GgufHeader, GgufTensor
from surgery.checkpoint.gguf_store import Mapped
from surgery.common.errors import SurgeryError

_UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_ROPE_FACTORS = "rope_freqs.weight"
# What every model with llama3's scaling has had so far; the factor alone differs.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Arch:
    """An architecture of GGUF: its class, whether rows of q and k are permuted, and fields that its config needs."""

    model_class: str
    permuted: bool = False
    fields: tuple[tuple[str, Any], ...] = ()


ARCHS = {
    "llama": Arch("LlamaForCausalLM", permuted=True, fields=(("mlp_bias", False),)),
    "qwen2": Arch("Qwen2ForCausalLM", fields=(("use_sliding_window", False),)),
    "qwen3": Arch("Qwen3ForCausalLM", fields=(("attention_bias", False), ("use_sliding_window", False))),
}


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file as a checkpoint.

    Attributes:
        config: its config.json.
        tensors: by their names in a Hugging Face checkpoint.
        dtype: of the dequantized tensors: what most numbers are stored in, or bfloat16 where that is quantized. Models
            are trained in bfloat16, and its rounding (2⁻⁹ of a number) is less than that of 8-bit blocks; norms, which
            GGUF stores in float32 whatever the model's dtype, were bfloat16 numbers before.
        dequantised_from: the type that most numbers are stored in, where it is a quantized one.
    """

    config: dict[str, Any]
    tensors: dict[str, Mapped]
    dtype: torch.dtype
    dequantised_from: str | None


def describe_model(path: Path, header: GgufHeader) -> GgufModel:
    """Maps the header of a GGUF file.

    Raises:
        SurgeryError: its architecture, or something in it, is not supported.
    """
    values = _Values(path, header.metadata)
    name = values.text("general.architecture")
    if name not in ARCHS:
        raise SurgeryError.at(path, f"GGUF architecture {name!r} is not supported (supported: {', '.join(ARCHS)})")
    _refuse_parts(values, name)
    numbers = Counter()
    for tensor in header.tensors.values():
        numbers[tensor.type] += math.prod(tensor.shape)
    ((format, _),) = numbers.most_common(1) or (("F32", 0),)
    dtype = _UNQUANTIZED.get(format, torch.bfloat16)
    config = _config(path, values, header, name, dtype)
    return GgufModel(
        config, _tensors(path, header, config, ARCHS[name]), dtype, None if format in _UNQUANTIZED else format
    )


class _Values:
    """Metadata by key, with one-line errors."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path, self._metadata = path, metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(key, default)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise SurgeryError.at(self.path, f"{key} is {value!r} in its metadata; give the file of a whole model")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise SurgeryError.at(self.path, f"{key} is {value!r} in its metadata, not one positive number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32, as short as it was written: 1e-05, not 9.999999747378752e-06."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e38:
            raise SurgeryError.at(self.path, f"{key} is {value!r} in its metadata, not a positive number")
        return float(str(np.float32(value)))


def _refuse_parts(values: _Values, arch: str) -> None:
    """Refuses what the mapping would drop silently."""
    if (count := values.get("split.count", 1)) not in (0, 1):
        raise SurgeryError.at(values.path, f"one of {count} parts of a model; join them (llama-gguf-split --merge)")
    if values.get(f"{arch}.expert_count", 0):
        raise SurgeryError.at(values.path, "a mixture of experts as GGUF is not supported; give its Hugging Face files")
    if values.get(f"{arch}.attention.sliding_window"):
        raise SurgeryError.at(values.path, "sliding windows in GGUF are not supported; give its Hugging Face files")
    scaling = values.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise SurgeryError.at(
            values.path, f"RoPE scaling {scaling!r} in GGUF is not supported; give its Hugging Face files"
        )


def _config(path: Path, values: _Values, header: GgufHeader, name: str, dtype: torch.dtype) -> dict[str, Any]:
    def whole(key: str, default: int | None = None) -> int:
        return values.whole(f"{name}.{key}", default)

    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", hidden // heads)
    if whole("attention.value_length", head_dim) != head_dim:
        raise SurgeryError.at(path, "keys and values of different widths are not supported")
    if whole("rope.dimension_count", head_dim) != head_dim:
        raise SurgeryError.at(path, "RoPE over a part of a head is not supported")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SurgeryError.at(path, "has no token_embd.weight; give the file of a whole model")
    check_sizes({"head_dim": head_dim, "num_attention_heads": heads, "hidden_size": hidden}, str(path))
    if head_dim % 2:
        raise SurgeryError.at(path, f"heads of {head_dim} numbers, which RoPE cannot pair")
    rope = {"rope_type": "default", "rope_theta": values.number(f"{name}.rope.freq_base", 10_000.0)}
    config = {
        "architectures": [ARCHS[name].model_class],
        "model_type": name,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": values.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _scaled(path, rope, header.tensors.get(_ROPE_FACTORS), head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **dict(ARCHS[name].fields),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    check_sizes(config, str(path))
    return config | special_tokens(header.metadata)


def special_tokens(metadata: dict[str, Any]) -> dict[str, int]:
    """The ids that config and generation config name, of those that the file has."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {field: metadata.get(f"tokenizer.ggml.{key}_token_id") for field, key in keys.items()}
    return {field: token for field, token in ids.items() if type(token) is int}


def _scaled(path: Path, rope: dict[str, Any], factors: GgufTensor | None, head_dim: int) -> dict[str, Any]:
    """RoPE's parameters with llama3's scaling where the file has its factors: by what each frequency is divided."""
    if factors is None:
        return rope
    if factors.shape != (head_dim // 2,):
        raise SurgeryError.at(path, f"{_ROPE_FACTORS} {list(factors.shape)} does not fit heads of {head_dim} numbers")
    with disk_errors(path), open(path, "rb") as file:
        file.seek(factors.offset)
        stored = np.frombuffer(file.read(factors.nbytes), dtype="<f4")
    scaling = {**rope, "rope_type": "llama3", "factor": float(stored.max(initial=1.0)), **_LLAMA3}
    expected = llama3_factors(scaling, head_dim).numpy()
    if factors.type != "F32" or stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise SurgeryError.at(
            path, f"its RoPE factors ({_ROPE_FACTORS}) are not those of llama3's scaling; give its Hugging Face files"
        )
    return scaling


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return the divisors of each frequency in Llama 3's scaling, [d/2] float32; llama.cpp reads them as
    ``rope_freqs``."""
    freqs = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * freqs / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def _tensors(path: Path, header: GgufHeader, config: dict[str, Any], arch: Arch) -> dict[str, Mapped]:
    mapped, permuted = {}, {}
    if arch.permuted:
        permuted = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    for name, stored in header.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if name in OUTSIDE:
            mapped[OUTSIDE[name]] = Mapped(stored)
        elif match and match[2] in IN_LAYER:
            module = IN_LAYER[match[2]]
            order = None
            if module in permuted:
                heads, head_dim = config[permuted[module]], config["head_dim"]
                if stored.shape[0] != heads * head_dim:
                    raise SurgeryError.at(path, f"{name} has {stored.shape[0]} rows, not {heads} heads of {head_dim}")
                order = _halves(heads, head_dim)
            mapped[f"model.layers.{match[1]}.{module}.{match[3]}"] = Mapped(stored, order)
        else:
            raise SurgeryError.at(path, f"holds a tensor {name}, which is not part of a {config['model_type']} model")
    return mapped


def _halves(heads: int, head_dim: int) -> Tensor:
    """The stored row of each row: rotated pairs are neighbors in the file, halves of a head in a checkpoint."""
    rows = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)
