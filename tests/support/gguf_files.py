"""Tiny GGUF files, written with the gguf package as llama.cpp's converter would."""

import json
from pathlib import Path

import numpy as np
import tiny_models
import transformers as hf
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from tiny_models import CAPS, DEMO, MULTIPLIERS, random_model
from transformers import PreTrainedModel

SHAPE = {**tiny_models.SHAPE, "hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-5}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama_bias": lambda: hf.LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True),
    "qwen2": lambda: hf.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    # transformers' loader knows no other width of qwen3's heads.
    "qwen3": lambda: hf.Qwen3Config(**SHAPE, head_dim=128, tie_word_embeddings=False),
}
LAYERS = {**SHAPE, "num_hidden_layers": 4}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0]}
# Further architectures: other head widths, windows, RoPE and tied or untied embeddings.
CONFIGS |= {
    "llama_yarn": lambda: hf.LlamaConfig(**SHAPE, rope_parameters=YARN),
    "llama_linear": lambda: hf.LlamaConfig(**SHAPE, rope_parameters={**YARN, "rope_type": "linear"}),
    "gemma": lambda: hf.GemmaConfig(**{**SHAPE, "num_key_value_heads": 1}, head_dim=32, hidden_act="gelu_pytorch_tanh"),
    "gemma2": lambda: hf.Gemma2Config(
        **LAYERS, **{**CAPS, "query_pre_attn_scalar": 24}, head_dim=24, **WINDOWS, tie_word_embeddings=True
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **LAYERS,
        **WINDOWS,
        head_dim=24,
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": lambda: hf.Phi3Config(**SHAPE, sliding_window=16, tie_word_embeddings=False),
    "phi3_long": lambda: hf.Phi3Config(
        **SHAPE,
        original_max_position_embeddings=128,
        partial_rotary_factor=0.375,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.375, **LONG},
    ),
    "granite": lambda: hf.GraniteConfig(**SHAPE, **MULTIPLIERS),
    "olmo2": lambda: hf.Olmo2Config(**SHAPE),
    "smollm3": lambda: hf.SmolLM3Config(**LAYERS),
    "seed_oss": lambda: hf.SeedOssConfig(**SHAPE, head_dim=32, attention_bias=True, attention_out_bias=False),
    "starcoder2": lambda: hf.Starcoder2Config(
        **SHAPE, use_bias=True, sliding_window=None, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True
    ),
    "stablelm": lambda: hf.StableLmConfig(**SHAPE, use_qkv_bias=True, partial_rotary_factor=0.5),
    "command-r": lambda: hf.CohereConfig(**SHAPE, logit_scale=0.5),
    "cohere2": lambda: hf.Cohere2Config(**LAYERS, logit_scale=0.5, **WINDOWS, head_dim=16),
}
ARCHS = {"gemma3_text": "gemma3", "cohere": "command-r"}
SPACE = "\u2581"
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": f"<unk> <s> </s> <0xC3> <0xA9> {SPACE} a b c {SPACE}a ab bc <|x|>".split(),
    "tokenizer.ggml.scores": [0.0] * 5 + [-9.0] * 4 + [-3.0, -5.0, -4.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, *[1] * 7, 3],
}
PERMUTED = ("llama", "granite", "smollm3")


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
        more: further metadata by key; numbers, booleans, strings and None, which leaves a key out.
        tensors: further tensors by name.
    """
    config = model.config
    arch = ARCHS.get(config.model_type, config.model_type)
    values = {f"{arch}.{key}": value for key, value in metadata(config).items()} | (more or {})
    names = get_tensor_name_map(next(k for k, v in MODEL_ARCH_NAMES.items() if v == arch), config.num_hidden_layers)
    writer = GGUFWriter(path, values.pop("general.architecture", arch))
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    if tokenizer:
        _add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if arch in PERMUTED and name.endswith(("q_proj.weight", "q_proj.bias")):
            array = permuted(array, config.num_attention_heads)
        elif arch in PERMUTED and name.endswith(("k_proj.weight", "k_proj.bias")):
            array = permuted(array, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        quantized = kind not in ("F32", "F16", "BF16")
        stored = "F32" if array.ndim == 1 else "Q8_0" if quantized and "down_proj" in name else kind
        _add_tensor(writer, names.get_name(name, (".weight", ".bias")), array, stored)
    if config.rope_parameters.get("rope_type") == "longrope":
        factors = {length: config.rope_parameters[f"{length}_factor"] for length in ("short", "long")}
        tensors = {f"rope_factors_{length}.weight": np.float32(values) for length, values in factors.items()}
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


def metadata(config) -> dict:
    """Keys below the architecture's name, as llama.cpp's converter writes them."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer_norm = getattr(config, "norm_epsilon", None) or getattr(config, "layer_norm_eps", None)
    values = {
        "block_count": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": None if layer_norm else config.rms_norm_eps,
        "attention.layer_norm_epsilon": layer_norm,
        "rope.freq_base": rope["rope_theta"],
    }
    if config.model_type not in ("llama", "qwen2"):
        part = rope.get("partial_rotary_factor", 1.0)
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        values["rope.dimension_count"] = int(head_dim * part)
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if before := rope.get("original_max_position_embeddings"):
        values["rope.scaling.original_context_length"] = before
    if config.model_type in ("gemma2", "gemma3_text", "cohere2", "phi3"):
        values["attention.sliding_window"] = config.sliding_window or 0
    if config.model_type in ("gemma3_text", "cohere2"):  # else every sixth or fourth layer has none
        values["attention.sliding_window_pattern"] = 2
    if config.model_type == "gemma2":
        values |= {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if config.model_type == "granite":
        values |= {f"{name}_scale": getattr(config, f"{name}_multiplier") for name in ("embedding", "residual")}
        values |= {"attention.scale": config.attention_multiplier, "logit_scale": config.logits_scaling}
    if config.model_type in ("cohere", "cohere2"):
        values["logit_scale"] = config.logit_scale
    return values


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
