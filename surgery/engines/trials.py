"""Trials: kinds of checkpoints that our tests ran in each engine.

transformers runs without this package in tests/test_convert*.py and tests/families. llama.cpp, mlx-lm and vLLM's CPU
build (its own classes, and our plugin) run in tests/engines, which compare greedy tokens and log-probabilities with
transformers.

A kind is :attr:`surgery.engines.facts.Facts.kind`. Every entry needs a test; a test fails if a kind has no case.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """Version and device of an engine, and the kinds of checkpoints that ran there."""

    version: str
    device: str
    kinds: frozenset[str]

    def __str__(self) -> str:
        return f"{self.version} on {self.device}"


TRANSFORMERS = Trial(
    "5.24.0",
    "CPU",
    frozenset(
        {
            *("mla", "mla with biases", "mla with a frequency list", "mla with biases with a frequency list"),
            *("mla with experts", "mla with YaRN with experts", "deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu"),
            *("llama", "mistral", "mistral with a window", "mixtral", "qwen2", "qwen2 with a window", "seed_oss"),
            *("smollm3", "granite", "granitemoe", "arcee", "ernie4_5", "helium", "jais2", "nemotron", "qwen2_moe"),
            *("glm", "glm4", "glm4_moe", "cohere", "cohere2 with a window", "ministral with a window", "ministral3"),
            *("llama4_text", "mistral4", "stablelm", "starcoder2", "starcoder2 with a window", "gemma", "gemma2"),
            *("gemma2 with a window", "gpt_oss", "gpt_oss with a window", "llava", "llava_next", "mistral3"),
            *("granitemoehybrid", "qwen2_5_vl", "surgery"),
        }
    ),
)
LLAMA_CPP = Trial("b11549", "CPU", frozenset({"mla", "llama", "mistral"}))
MLX = Trial(
    "0.32.2",
    "CPU",
    frozenset(
        {
            *("mla", "llama", "mistral", "qwen2", "smollm3", "granite", "glm4", "cohere", "stablelm", "seed_oss"),
            *("gemma2", "ministral3", "mixtral"),
        }
    ),
)
MLX_DIFFERS = {
    "glm": "it rotates whole heads, but this model rotates half of each",
    **dict.fromkeys(
        ("mistral with a window", "qwen2 with a window", "gemma2 with a window"),
        "it attends to all tokens, but this model has sliding windows",
    ),
}
"""Families that load in mlx-lm but compute different outputs, with the reason; tests saw other tokens."""
VLLM_CPU = Trial("0.32.0", "CPU", frozenset({"mla", "llama", "mistral", "qwen2"}))
FAMILIES = ("llama", "mistral", "qwen2")
LATENTS = ("mla", "mla in bits", "low rank", "low rank in bits", "mla + low rank", "hybrid heads")
MERGED = ("KV heads by layer", "mla + KV heads by layer", "low rank + KV heads by layer")
# Checkpoints of the custom model class, by Facts.served, with the plugin surgery_vllm; also in tests/engines.
VLLM_PLUGIN = Trial(
    "0.32.0",
    "CPU",
    frozenset(
        {
            *(f"{kind} of {family}" for kind in LATENTS for family in (*FAMILIES, "qwen3")),
            *(f"{kind} of {family}" for kind in (*MERGED, "mla + low rank + KV heads by layer") for family in FAMILIES),
        }
    ),
)

# All sizes that vLLM's FlashAttnPrefillBackend.supports_mla_dimensions accepts; a test calls it.
VLLM_MLA_HEADS = ((64, 64, 128), (128, 64, 128), (192, 64, 256), (256, 0, 256))
VLLM_CHECKED = "0.32.0"
