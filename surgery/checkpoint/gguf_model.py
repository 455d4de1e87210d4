"""Hugging Face view of a GGUF file: config.json, tensor names, row order, dtype.

Tensor names and metadata keys follow llama.cpp's converter. The converter makes three changes that are reverted here:
q and k rows of Llama-like models are permuted for RoPE on adjacent elements, llama3's RoPE scaling becomes a tensor of
factors, and norm weights w of 1 + w norms become the sum. Mistral models have the architecture ``llama`` in GGUF and
become Llama checkpoints with equal outputs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
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
_OTHERWISE = "use the Hugging Face checkpoint instead"
# Equal in all published models with llama3 scaling; only the factor differs.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Arch:
    """GGUF architecture, and its mapping to a Hugging Face checkpoint.

    Attributes:
        model_class: entry of ``architectures`` in the config.
        model_type: model type of the config, if it differs from the GGUF name.
        permuted: whether q and k rows are permuted.
        fields: constant config entries.
        numbers: config entries read from metadata, by the key after the architecture's prefix.
        biases: boolean config entries, with the GGUF module whose bias they indicate.
        names: per-layer module names that differ from ``IN_LAYER``.
        norm_offset: added to the stored norm weights.
        norm_eps: config entry for the eps of LayerNorms; None for models with RMSNorm.
        windows: one of this many layers has full attention; 0: no window, 1: all layers if metadata has a window.
        partial: whether the model class supports partial RoPE.
        large: number of layers of the model whose query scale derives from the hidden size (Gemma 2 and 3).
    """

    model_class: str
    model_type: str | None = None
    permuted: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    norm_eps: str | None = None
    windows: int = 0
    partial: bool = False
    large: int | None = None


_BIAS = {"attention_bias": "attn_q"}
_GELU = "gelu_pytorch_tanh"
_GEMMA = {"hidden_act": _GELU, "hidden_activation": _GELU}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
ARCHS = {
    "llama": Arch("LlamaForCausalLM", permuted=True, biases={**_BIAS, "mlp_bias": "ffn_up"}),
    "qwen2": Arch("Qwen2ForCausalLM", fields={"use_sliding_window": False}),
    "qwen3": Arch("Qwen3ForCausalLM", fields={"use_sliding_window": False}, biases=_BIAS),
    "gemma": Arch("GemmaForCausalLM", fields=_GEMMA, norm_offset=-1.0),
    "gemma2": Arch(
        "Gemma2ForCausalLM",
        fields=_GEMMA,
        numbers={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        names=_NORMS_AFTER,
        norm_offset=-1.0,
        windows=2,
        large=46,
    ),
    "gemma3": Arch(
        "Gemma3ForCausalLM", "gemma3_text", fields=_GEMMA, names=_NORMS_AFTER, norm_offset=-1.0, windows=6, large=62
    ),
    "phi3": Arch(
        "Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        windows=1,
        partial=True,
    ),
    "granite": Arch(
        "GraniteForCausalLM",
        permuted=True,
        numbers={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        biases={**_BIAS, "mlp_bias": "ffn_up"},
    ),
    "olmo2": Arch("Olmo2ForCausalLM", names=_NORMS_AFTER, biases=_BIAS),
    "smollm3": Arch(
        "SmolLM3ForCausalLM",
        permuted=True,
        fields={"no_rope_layer_interval": 4, "use_sliding_window": False},
        biases={**_BIAS, "mlp_bias": "ffn_up"},
    ),
    "seed_oss": Arch(
        "SeedOssForCausalLM",
        biases={**_BIAS, "attention_out_bias": "attn_output"},
        names={"post_attention_norm": "post_attention_layernorm"},
    ),
    "starcoder2": Arch(
        "Starcoder2ForCausalLM",
        fields={"hidden_act": _GELU, "sliding_window": None},
        biases={"use_bias": "attn_q"},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_eps="norm_epsilon",
    ),
    "stablelm": Arch("StableLmForCausalLM", biases={"use_qkv_bias": "attn_q"}, norm_eps="layer_norm_eps", partial=True),
    "command-r": Arch(
        "CohereForCausalLM", "cohere", numbers={"logit_scale": "logit_scale"}, biases=_BIAS, norm_eps="layer_norm_eps"
    ),
    "cohere2": Arch(
        "Cohere2ForCausalLM", numbers={"logit_scale": "logit_scale"}, biases=_BIAS, norm_eps="layer_norm_eps", windows=4
    ),
}


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file mapped to a Hugging Face checkpoint.

    Attributes:
        tensors: stored tensors by Hugging Face name.
        dtype: dtype of the dequantized tensors: the stored type of most elements, or bfloat16 if that is quantized,
            whose relative rounding error of 2⁻⁹ is less than that of 8-bit blocks.
        dequantised_from: the stored type of most elements, if quantized; else None.
    """

    config: dict[str, Any]
    tensors: dict[str, Mapped]
    dtype: torch.dtype
    dequantised_from: str | None


def describe_model(path: Path, header: GgufHeader) -> GgufModel:
    """Map the header of a GGUF file to a Hugging Face checkpoint.

    Raises SurgeryError: the architecture or one of its settings or tensors is not supported.
    """
    values = _Values(path, header.metadata)
    name = values.text("general.architecture")
    if name not in ARCHS:
        supported = f"(supported: {', '.join(ARCHS)})"
        raise SurgeryError.at(path, f"GGUF architecture {name!r} is not supported {supported}; {_OTHERWISE}")
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
    """Typed access to metadata, with one-line errors."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path, self._metadata = path, metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(key, default)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise SurgeryError.at(
                self.path, f"metadata key {key} must be text, not {value!r}; use the file of a complete model"
            )
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise SurgeryError.at(self.path, f"metadata key {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive float32 in its shortest decimal form: 1e-05, not 9.999999747378752e-06."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e38:
            raise SurgeryError.at(self.path, f"metadata key {key} must be a positive number, not {value!r}")
        return float(str(np.float32(value)))


def _refuse_parts(values: _Values, arch: str) -> None:
    """Refuse features that the mapping would drop silently: split files, experts, unsupported sliding windows."""
    if (count := values.get("split.count", 1)) not in (0, 1):
        raise SurgeryError.at(values.path, f"is one of {count} parts of a model; merge them (llama-gguf-split --merge)")
    if values.get(f"{arch}.expert_count", 0):
        raise SurgeryError.at(values.path, f"mixture-of-experts models in GGUF are not supported; {_OTHERWISE}")
    if values.get(f"{arch}.attention.sliding_window") and not ARCHS[arch].windows:
        raise SurgeryError.at(values.path, f"sliding windows in GGUF of {arch!r} are not supported; {_OTHERWISE}")


def _config(path: Path, values: _Values, header: GgufHeader, name: str, dtype: torch.dtype) -> dict[str, Any]:
    def whole(key: str, default: int | None = None) -> int:
        return values.whole(f"{name}.{key}", default)

    arch = ARCHS[name]
    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", hidden // heads)
    if whole("attention.value_length", head_dim) != head_dim:
        raise SurgeryError.at(path, f"different head sizes for keys and values are not supported; {_OTHERWISE}")
    rotated = whole("rope.dimension_count", head_dim)
    if rotated != head_dim and not (arch.partial and rotated < head_dim):
        raise SurgeryError.at(path, f"partial RoPE is not supported for {name!r}; {_OTHERWISE}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SurgeryError.at(path, "token_embd.weight is missing; use the file of a complete model")
    check_sizes({"head_dim": head_dim, "num_attention_heads": heads, "hidden_size": hidden}, str(path))
    if head_dim % 2 or rotated % 2:
        raise SurgeryError.at(
            path, f"head size {head_dim} with {rotated} rotary dimensions is not supported; both must be even"
        )
    layers, kind = whole("block_count"), "layer_norm_epsilon" if arch.norm_eps else "layer_norm_rms_epsilon"
    config = {
        "architectures": [arch.model_class],
        "model_type": arch.model_type or name,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": whole("context_length"),
        arch.norm_eps or "rms_norm_eps": values.number(f"{name}.attention.{kind}"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **arch.fields,
        **{field: values.number(f"{name}.{key}") for field, key in arch.numbers.items()},
        **{field: f"blk.0.{module}.bias" in header.tensors for field, module in arch.biases.items()},
        "dtype": str(dtype).removeprefix("torch."),
    }
    if arch.large:
        config["query_pre_attn_scalar"] = hidden // heads if layers == arch.large else head_dim
    if name == "stablelm":
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.tensors
        config["qk_layernorm"] = False
    rope = _rope(path, values, header, name, head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    config |= {"rope_parameters": rope, **_windows(values, name, config)}
    if name == "gemma3":
        near = {"rope_type": "default", "rope_theta": values.number(f"{name}.rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": near}
    if rope["rope_type"] == "longrope":
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    check_sizes(config, str(path))
    # The default padding id of a config class can exceed this vocabulary.
    return config | {"pad_token_id": None} | special_tokens(header.metadata)


def _windows(values: _Values, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config entries for sliding windows; most files leave the layer pattern to the architecture."""
    every, window = ARCHS[name].windows, f"{name}.attention.sliding_window"
    if not every:
        return {}
    if every == 1:
        return {"sliding_window": values.get(window) or None}
    layers = config["num_hidden_layers"]
    pattern = values.get(key := f"{name}.attention.sliding_window_pattern", every)
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if type(pattern) is not list or len(pattern) != layers:
        raise SurgeryError.at(
            values.path, f"metadata key {key} must be a number or a list of one per layer, not {pattern!r}"
        )
    kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"sliding_window": values.whole(window), "layer_types": kinds}


def special_tokens(metadata: dict[str, Any]) -> dict[str, int]:
    """Return the BOS, EOS and padding ids in the metadata as entries for config and generation config."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {field: metadata.get(f"tokenizer.ggml.{key}_token_id") for field, key in keys.items()}
    return {field: token for field, token in ids.items() if type(token) is int}


def _rope(path: Path, values: _Values, header: GgufHeader, name: str, head_dim: int) -> dict[str, Any]:
    """Return the RoPE parameters: default, linear, YaRN, LongRoPE (Phi) or llama3 scaling."""
    key = f"{name}.rope.scaling"
    rope = {"rope_type": "default", "rope_theta": values.number(f"{name}.rope.freq_base", 10_000.0)}
    kind = values.get(f"{key}.type", "none")
    lists = {length: header.tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long")}
    if all(lists.values()):
        factors = {f"{length}_factor": _factors(path, tensor) for length, tensor in lists.items()}
        before = values.whole(f"{key}.original_context_length")
        return {**rope, "rope_type": "longrope", **factors, "original_max_position_embeddings": before}
    if kind == "yarn" and name != "phi3":
        rest = [f"{key}.{field}" for field in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")]
        if odd := [field for field in rest if values.get(field, 1.0) != 1.0]:
            raise SurgeryError.at(path, f"YaRN with {odd[0]} in GGUF is not supported; {_OTHERWISE}")
        rope["original_max_position_embeddings"] = values.whole(f"{key}.original_context_length")
        rope |= {f"beta_{end}": values.number(f"{key}.yarn_beta_{end}", d) for end, d in (("fast", 32), ("slow", 1))}
    elif kind not in ("none", "linear"):
        raise SurgeryError.at(path, f"RoPE scaling {kind!r} in GGUF is not supported; {_OTHERWISE}")
    if kind != "none":
        return {**rope, "rope_type": kind, "factor": values.number(f"{key}.factor")}
    return _scaled(path, rope, header.tensors.get(_ROPE_FACTORS), head_dim)


def _factors(path: Path, stored: GgufTensor) -> list[float]:
    """Read a float32 vector of RoPE factors, of at most 4,096 elements."""
    if stored.type != "F32" or len(stored.shape) != 1 or stored.shape[0] > 4096:
        raise SurgeryError.at(
            path, f"RoPE factors of type {stored.type} and shape {list(stored.shape)} are not supported"
        )
    with disk_errors(path), open(path, "rb") as file:
        file.seek(stored.offset)
        return [float(str(number)) for number in np.frombuffer(file.read(stored.nbytes), dtype="<f4")]


def _scaled(path: Path, rope: dict[str, Any], factors: GgufTensor | None, head_dim: int) -> dict[str, Any]:
    """Add llama3 scaling to the RoPE parameters if the file has its factors, the divisors of the frequencies."""
    if factors is None:
        return rope
    if factors.shape != (head_dim // 2,):
        raise SurgeryError.at(path, f"{_ROPE_FACTORS} has shape {list(factors.shape)}, head size is {head_dim}")
    stored = np.array(_factors(path, factors))
    scaling = {**rope, "rope_type": "llama3", "factor": float(stored.max(initial=1.0)), **_LLAMA3}
    expected = llama3_factors(scaling, head_dim).numpy()
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise SurgeryError.at(path, f"RoPE factors ({_ROPE_FACTORS}) do not match llama3 scaling; {_OTHERWISE}")
    return scaling


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return the divisor of each frequency in Llama 3's RoPE scaling, [d/2] float32: ``rope_freqs`` in llama.cpp."""
    freqs = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * freqs / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def _tensors(path: Path, header: GgufHeader, config: dict[str, Any], arch: Arch) -> dict[str, Mapped]:
    mapped, permuted, names = {}, {}, IN_LAYER | arch.names
    if arch.permuted:
        permuted = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    for name, stored in header.tensors.items():
        if name in (_ROPE_FACTORS, "rope_factors_short.weight", "rope_factors_long.weight"):
            continue
        offset = arch.norm_offset if name.endswith("_norm.weight") else 0.0
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if name in OUTSIDE:
            mapped[OUTSIDE[name]] = Mapped(stored, offset=offset)
        elif name == "output_norm.bias" and arch.norm_eps:
            mapped["model.norm.bias"] = Mapped(stored)
        elif match and match[2] in names:
            module = names[match[2]]
            order = None
            if module in permuted:
                heads, head_dim = config[permuted[module]], config["head_dim"]
                if stored.shape[0] != heads * head_dim:
                    raise SurgeryError.at(
                        path, f"{name} has {stored.shape[0]} rows, not {heads} heads of size {head_dim}"
                    )
                order = _stored_rows(heads, head_dim)
            mapped[f"model.layers.{match[1]}.{module}.{match[3]}"] = Mapped(stored, order, offset)
        else:
            raise SurgeryError.at(
                path, f"contains a tensor {name}, which is not part of a {config['model_type']} model"
            )
    return mapped


def _stored_rows(heads: int, head_dim: int) -> Tensor:
    """Return the stored row of each row: RoPE pairs are adjacent in GGUF, half a head apart in a checkpoint."""
    rows = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)
