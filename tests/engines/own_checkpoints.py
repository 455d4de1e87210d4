"""Random checkpoints of the own class with MLA that no stock class holds: any frequencies, ranks by layer, biases."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tiny_models import DEMO, SHAPE
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from surgery.model import SurgeryConfig, SurgeryForCausalLM


def latent(rank: int, frequencies: list[float], **changes) -> dict:
    """An entry of `attention_layers`."""
    entry = {"kind": "latent", "kv_lora_rank": rank, "rope_inv_freq": frequencies, "key_norm_eps": None}
    return entry | changes


SAME = [latent(20, [1.0, 0.37, 0.021]), latent(20, [0.8, 0.4, 0.3])]
UNEQUAL = [latent(24, [1.0, 0.37, 0.021]), latent(11, [0.9])]
SOURCES = {
    "llama": (lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True), SAME),
    "llama_bias": (lambda: LlamaConfig(**SHAPE, attention_bias=True, head_dim=16), UNEQUAL),
    "qwen2": (lambda: Qwen2Config(**SHAPE), SAME),
    "mistral": (lambda: MistralConfig(**SHAPE, sliding_window=None), SAME),
    "mistral_window": (lambda: MistralConfig(**SHAPE, sliding_window=16), SAME),
    "qwen3": (lambda: Qwen3Config(**SHAPE, head_dim=16), [latent(20, [1.0], key_norm_eps=1e-6)] * 2),
}


def cached_numbers(name: str) -> int:
    """Per token, of all layers."""
    return sum(entry["kv_lora_rank"] + 2 * len(entry["rope_inv_freq"]) for entry in SOURCES[name][1])


def make(name: str, folder: Path) -> Path:
    """Saves one, with a tokenizer and with biases and norms that are not trivial."""
    torch.manual_seed(0)
    base, entries = SOURCES[name]
    model = SurgeryForCausalLM(SurgeryConfig.from_base(base(), entries)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder / file)
    return folder
