"""Tiny random checkpoints of every family with the demo model's tokenizer."""

import shutil
from pathlib import Path

import torch
import transformers as hf
from config_files import edit_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()
torch.set_num_threads(min(2, torch.get_num_threads()))

ASSETS = Path(__file__).resolve().parents[2] / "surgery" / "assets"
DEMO, HELD_OUT = ASSETS / "demo-model", ASSETS / "heldout-stdlib.txt"
SHORT_TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 1}
SHORT_TEXT_FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT_TEXT.items()]
"""Text of a calibration for tiny models: as settings, and as options of a command."""

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2}
SINKS = {
    **{**SHAPE, **EXPERTS, "head_dim": 16, "num_local_experts": 4},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"truncate": False, "original_max_position_embeddings": 32},
    },
}
# Caps that random models reach.
CAPS = {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0}
WINDOW_IN_LAYER_0 = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
STATE_IN_LAYER_0 = {
    **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, **LINEAR},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
SHARED_EXPERT = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
MULTIPLIERS = {
    **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16}
HALF_ROTATED = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA4 = {
    **{**SHAPE, "head_dim": 16, "intermediate_size_mlp": 40, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    **{"moe_layers": [1], "attention_chunk_size": 80, "floor_scale": 72, "attn_scale": 0.5},
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
VISION |= {"image_size": 16, "patch_size": 4}
LLAMA4_VISION = {**VISION, "intermediate_size": 64, "vision_output_dim": 8, "pixel_shuffle_ratio": 0.5}
LLAMA4_VISION |= {"projector_input_dim": 8, "projector_output_dim": 8}

CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**SHAPE, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "llama3": lambda: hf.LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE, head_dim=16),
    "llama_bias": lambda: hf.LlamaConfig(**SHAPE, rms_norm_eps=1e-6, attention_bias=True),
    "mistral": lambda: hf.MistralConfig(**SHAPE, rms_norm_eps=1e-5, sliding_window=None),
    "mistral_window": lambda: hf.MistralConfig(**SHAPE, sliding_window=16),
    "qwen2": lambda: hf.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2_window": lambda: hf.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**SHAPE, head_dim=16),
    "mixtral": lambda: hf.MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=24, head_dim=16, mlp_only_layers=[1]
    ),
    # From here on families and shapes whose conversions are tested in tests/families/test_matrix.py.
    "falcon3": lambda: hf.LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, rms_norm_eps=1e-6, head_dim=32),
    "granite": lambda: hf.GraniteConfig(**SHAPE, **MULTIPLIERS),
    "seed_oss": lambda: hf.SeedOssConfig(**SHAPE, head_dim=16, attention_bias=True, attention_out_bias=False),
    "ministral_window": lambda: hf.MinistralConfig(**SHAPE, head_dim=16, **WINDOW_IN_LAYER_0),
    "smollm3": lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0]),
    "glm": lambda: hf.GlmConfig(**SHAPE, head_dim=16, attention_bias=True),
    "glm4": lambda: hf.Glm4Config(**SHAPE, head_dim=16, attention_bias=True),
    "cohere": lambda: hf.CohereConfig(**SHAPE, logit_scale=0.5),
    "cohere2_window": lambda: hf.Cohere2Config(**SHAPE, logit_scale=0.5, head_dim=8, **WINDOW_IN_LAYER_0),
    "stablelm": lambda: hf.StableLmConfig(**SHAPE, use_qkv_bias=True, partial_rotary_factor=0.5),
    "starcoder2": lambda: hf.Starcoder2Config(**SHAPE, use_bias=True, sliding_window=None),
    "starcoder2_window": lambda: hf.Starcoder2Config(**SHAPE, use_bias=True, sliding_window=16),
    "gemma2": lambda: hf.Gemma2Config(**SHAPE, head_dim=16, **CAPS, layer_types=["full_attention"] * 2),
    "gemma2_window": lambda: hf.Gemma2Config(**SHAPE, head_dim=16, **CAPS, **WINDOW_IN_LAYER_0),
    "gemma3_window": lambda: hf.Gemma3TextConfig(
        **SHAPE,
        head_dim=16,
        query_pre_attn_scalar=40,
        **WINDOW_IN_LAYER_0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**SINKS, layer_types=["full_attention"] * 2),
    "gpt_oss_window": lambda: hf.GptOssConfig(**SINKS, **WINDOW_IN_LAYER_0),
    "phi3": lambda: hf.Phi3Config(**SHAPE),
    "phi3_window": lambda: hf.Phi3Config(**SHAPE, sliding_window=16),
    "qwen3_next_state": lambda: hf.Qwen3NextConfig(
        **SHAPE, **SHARED_EXPERT, **STATE_IN_LAYER_0, attention_bias=True, mlp_only_layers=[1]
    ),
    "qwen3_5_state": lambda: hf.Qwen3_5TextConfig(
        **SHAPE, **{**STATE_IN_LAYER_0, "rope_parameters": {**STATE_IN_LAYER_0["rope_parameters"], **MROPE}}
    ),
    "qwen3_5_moe_state": lambda: hf.Qwen3_5MoeTextConfig(**SHAPE, **SHARED_EXPERT, **STATE_IN_LAYER_0),
    "olmo2": lambda: hf.Olmo2Config(**SHAPE),
    "ministral3": lambda: hf.Ministral3Config(
        **SHAPE,
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            "original_max_position_embeddings": 128,
        },
    ),
    # With chunks that texts here reach, where calibration does not; and, as in Maverick, without a q/k-norm.
    "llama4_window": lambda: hf.Llama4TextConfig(**LLAMA4, num_local_experts=4, rope_parameters=LLAMA3_ROPE),
    "llama4_plain_window": lambda: hf.Llama4TextConfig(**LLAMA4, num_local_experts=2, use_qk_norm=False),
    "olmo3_window": lambda: hf.Olmo3Config(
        **SHAPE,
        **WINDOW_IN_LAYER_0,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
}
CONFIGS |= {
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SHAPE, rope_parameters={"rope_type": "default", **HALF_ROTATED}),
    "gpt_neox_sequential": lambda: hf.GPTNeoXConfig(**SHAPE, attention_bias=False, use_parallel_residual=False),
    "gpt2": lambda: hf.GPT2Config(**SHAPE, n_inner=48),
    "phi4_mini": lambda: hf.Phi3Config(
        **{**SHAPE, "tie_word_embeddings": True},
        **{"original_max_position_embeddings": 128, "partial_rotary_factor": 0.75},
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [3.0] * 3},
    ),
    "granite4": lambda: hf.GraniteMoeHybridConfig(
        **{**SHAPE, **MULTIPLIERS, "num_local_experts": 0, "shared_intermediate_size": 48, **MAMBA},
        **{"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"},
    ),
    "granite4_state": lambda: hf.GraniteMoeHybridConfig(
        **{**SHAPE, **MULTIPLIERS, **EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 48, **MAMBA},
        layer_types=["linear_attention", "full_attention"],
    ),
    "gemma": lambda: hf.GemmaConfig(**{**SHAPE, "num_key_value_heads": 4}, head_dim=16),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **{**SHAPE, **LATENT_EXPERTS, "head_dim": 16, "attention_bias": True},
        **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
    ),
    "glm4_moe_norm": lambda: hf.Glm4MoeConfig(
        **{**SHAPE, **LATENT_EXPERTS, "head_dim": 16, "first_k_dense_replace": 0},
        **{"n_group": 1, "topk_group": 1, "use_qk_norm": True, "num_mtp_layers": 0},
    ),
    "apertus": lambda: hf.ApertusConfig(**SHAPE),
    "arcee": lambda: hf.ArceeConfig(**SHAPE),
    "dots1": lambda: hf.Dots1Config(**SHAPE, **LATENT_EXPERTS, first_k_dense_replace=1, sliding_window=None),
    "ernie4_5": lambda: hf.Ernie4_5Config(**SHAPE, head_dim=16),
    "granitemoe": lambda: hf.GraniteMoeConfig(**SHAPE, **MULTIPLIERS, **EXPERTS, num_local_experts=4),
    "helium": lambda: hf.HeliumConfig(**SHAPE, head_dim=8),
    "jais2": lambda: hf.Jais2Config(**SHAPE),
    "nemotron": lambda: hf.NemotronConfig(**SHAPE),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SHAPE, **SHARED_EXPERT, mlp_only_layers=[1]),
}
if hasattr(hf, "InternLM3Config"):  # newer than the floor
    CONFIGS["internlm3"] = lambda: hf.InternLM3Config(**SHAPE, head_dim=16)
ALL = tuple(CONFIGS)
# Families that cap logits of attention or have learned sinks.
OWN_SOFTMAX = ("gemma2", "gpt_oss")

LATENT = {
    **{**SHAPE, "num_key_value_heads": 4, "num_hidden_layers": 3},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
}
LATENT_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LATENT_LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, "factor": 2.0},
    **{"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 3.0, 4.0]},
}
LATENT_CONFIGS = {
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **LATENT, **LATENT_EXPERTS, q_lora_rank=None, first_k_dense_replace=1, rope_parameters=LATENT_YARN
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **LATENT,
        **LATENT_EXPERTS,
        **{"q_lora_rank": 20, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        rope_parameters=LATENT_YARN,
    ),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(
        **LATENT, **LATENT_EXPERTS, q_lora_rank=20, mlp_layer_types=["dense", "sparse", "dense"]
    ),
    "moonlight": lambda: hf.DeepseekV3Config(
        **LATENT, **LATENT_EXPERTS, q_lora_rank=None, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **LATENT, q_lora_rank=20, scale_emb=3, scale_depth=1.4, dim_model_base=16, rope_parameters=LATENT_LONG
    ),
    "youtu": lambda: hf.YoutuConfig(**{**LATENT, "initializer_range": 0.2}, q_lora_rank=20, attention_bias=True),
}
"""Models whose attention is MLA, which structures but MLA itself do not convert."""

CONFIGS |= LATENT_CONFIGS
FAMILIES = ALL[: ALL.index("falcon3")]
# What stock deepseek_v3 can carry, and the others.
STOCK = ("llama", "llama3", "llama_bias", "mistral", "qwen2")


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model in float32 with biases and norms that are not trivial."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key.endswith("sinks"):
                parameter.normal_(0, 3)
    return model


def make_checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Saves a tiny random model with biases and norms that are not trivial, and a tokenizer."""
    model = random_model(CONFIGS[name](), seed)
    model.to(dtype).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def needs_constant_norm(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny Llama with biases and an eps other than stock MLA's, whose latent needs a constant channel there."""
    edit_config(make_checkpoint(folder, "llama_bias", dtype), rms_norm_eps=1e-5)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Copy the demo model's tokenizer to a checkpoint."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder / file)


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = (), **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, but for the given merges, which may cross words; no special tokens but the given ones."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges), *special.values()]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def tokens(batch: int = 2, length: int = 40) -> torch.Tensor:
    """Random ones, the same in every call."""
    return torch.randint(3, 4096, (batch, length), generator=torch.Generator().manual_seed(0))
