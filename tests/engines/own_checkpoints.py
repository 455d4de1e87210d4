"""Random checkpoints of the custom model class: MLA with any frequencies, ranks by layer, biases, norms; KV heads by
layer."""

import json
import shutil
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
from tiny_models import SHAPE, add_tokenizer
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.model.quantized_latent_attention import QuantizedLatentAttention
from surgery.model.token_format import PATTERNS
from surgery.model.token_quantizer import TokenQuantizer


def latent(rank: int, frequencies: list[float], **changes) -> dict:
    """An entry of `attention_layers`."""
    entry = {"kind": "latent", "kv_lora_rank": rank, "rope_inv_freq": frequencies, "key_norm_eps": None}
    return entry | changes


def hybrid(full: int, heads: int = 2, sinks: int = 5, recent: int = 20) -> dict:
    """An entry of `attention_layers` whose first heads see all tokens."""
    entry = {"kind": "hybrid", "kv_heads": heads, "full_heads": full}
    return entry | {"sinks": sinks, "recent": recent, "head_order": list(range(heads))}


def low_rank(*blocks: tuple[int, list[int], list[int]], earlier: list[dict] = ()) -> dict:
    """An entry of `attention_layers`: of every block its rank and the heads of keys and of values.

    `earlier`: entries of the layers whose latents it reads too.
    """
    names = [{"rank": rank, "keys": keys, "values": values} for rank, keys, values in blocks]
    shared_rank = sum(block["rank"] for entry in earlier for block in entry["blocks"])
    shared = {"shared_layers": len(earlier), "shared_rank": shared_rank}
    return {"kind": "low_rank", "blocks": names, **shared, "sinks": 0, "window": 0}


def rows(latent: list, rope: list, frequencies: list[float], **changes) -> dict:
    """An entry of `attention_layers`: runs of the latent and of the shared key, and the frequencies of this."""
    entry = {"kind": "quantized_latent", "latent_runs": latent, "rope_runs": rope, "rope_inv_freq": frequencies}
    return entry | {"kv_lora_rank": channels(latent), "key_norm_eps": None, "first_tokens": 4} | changes


def low_rank_rows(runs: list, earlier: list[dict] = (), first_tokens: int = 4) -> dict:
    """An entry of `attention_layers`: runs of the latent."""
    entry = low_rank((channels(runs), [0, 1], [0, 1]), earlier=earlier)
    return entry | {"kind": "quantized_low_rank", "latent_runs": runs, "first_tokens": first_tokens}


def channels(runs: list) -> int:
    """Values of so many bytes of every pattern."""
    return sum(count * len(PATTERNS[pattern]) for pattern, count in runs)


def cascade_rows(*runs: list, first_tokens: int = 4) -> list[dict]:
    """Entries of one group of layers."""
    entries: list[dict] = []
    for each in runs:
        entries.append(low_rank_rows(each, entries, first_tokens))
    return entries


JOINT, APART = low_rank((11, [0, 1], [0, 1])), low_rank((5, [1], []), (6, [0], [1]), (4, [], [0]))
SAME = [latent(20, [1.0, 0.37, 0.021]), latent(20, [0.8, 0.4, 0.3])]
NORMED = [latent(20, [1.0, 0.1], key_norm_eps=1e-6), latent(24, [0.5], key_norm_eps=1e-6)]
ROWS = [
    rows([["8", 4], ["4+4", 8]], [["8", 2], ["4+4", 2]], [1.0, 0.37, 0.021]),
    rows([["4+4", 4], ["3+3+2", 2], ["2+2+2+2", 2]], [["5+3", 2]], [0.8, 0.3]),
]
# All channels of two heads of 8, or of 16, rotate, as conversions write them.
HEAD_ROWS = [
    rows([["8", 8], ["4+4", 4]], [["8", 2 * dim]], [10000 ** (-2 * pair / dim) for pair in range(dim // 2)] * 2)
    for dim in (8, 16)
]
GROUP = [["8", 4], ["4+4", 4]], [["5+3", 4], ["8", 2]], [["4+4", 4]]
CASCADE = [*cascade_rows(*GROUP), low_rank_rows([["4+4", 2], ["8", 4]])]
# Keys and values of every head apart, as `--to quantized` writes them.
HEADS_APART = low_rank((6, [0], []), (4, [1], []), (6, [], [0]), (8, [], [1]))
HEADS_APART |= {"kind": "quantized_low_rank", "first_tokens": 4}
HEADS_APART |= {"latent_runs": [["8", 6], ["4+4", 2], ["8", 6], ["2+2+2+2", 2]]}
HEADS = [None, {"kind": "grouped", "kv_heads": 1}]
LAYERS = {"mla": SAME[:1], "low_rank": [JOINT], "heads": HEADS}
# With heads of 32 numbers, the least that vLLM's attention on the CPU takes.
OF_32 = {
    "llama": partial(LlamaConfig, **SHAPE | {"head_dim": 32}),
    "mistral": partial(MistralConfig, **SHAPE | {"head_dim": 32, "sliding_window": None}),
    "qwen2": partial(Qwen2Config, **SHAPE | {"hidden_size": 128}),
}
UNEQUAL = [latent(24, [1.0, 0.37, 0.021]), latent(11, [0.9])]
SOURCES = {
    "llama": (lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True), SAME),
    "llama_bias": (lambda: LlamaConfig(**SHAPE, attention_bias=True, head_dim=16), UNEQUAL),
    "qwen2": (lambda: Qwen2Config(**SHAPE), SAME),
    "mistral": (lambda: MistralConfig(**SHAPE, sliding_window=None), SAME),
    "qwen3": (lambda: Qwen3Config(**SHAPE, head_dim=16), NORMED),
    "llama_low_rank": (lambda: LlamaConfig(**SHAPE), [JOINT, APART]),
    "mistral_low_rank": (lambda: MistralConfig(**SHAPE, sliding_window=None), [APART, JOINT]),
    "qwen2_low_rank": (lambda: Qwen2Config(**SHAPE), [JOINT, low_rank((7, [0, 1], [1, 0]), earlier=[JOINT])]),
    "qwen3_low_rank": (lambda: Qwen3Config(**SHAPE, head_dim=16), [APART, APART]),
    "qwen3_mla_low_rank": (lambda: Qwen3Config(**SHAPE, head_dim=16), [APART, NORMED[0]]),
    **{
        f"{family}_{'_'.join(kinds)}": (partial(base, num_hidden_layers=len(layers)), layers)
        for family, base in OF_32.items()
        for kinds in [("heads",), *combinations(LAYERS, 2), tuple(LAYERS)]
        for layers in [[entry for kind in kinds for entry in LAYERS[kind]]]
    },
}


# Heads that stream, of which all layers together have as many as full ones, more, and fewer.
HYBRIDS = {
    "llama_hybrid": (lambda: LlamaConfig(**SHAPE), [hybrid(1), hybrid(1)]),
    "qwen2_hybrid": (lambda: Qwen2Config(**SHAPE), [hybrid(1), hybrid(0)]),
    "qwen3_hybrid": (lambda: Qwen3Config(**SHAPE, head_dim=16), [None, hybrid(1, sinks=0, recent=9)]),
    "mistral_hybrid": (lambda: MistralConfig(**SHAPE, sliding_window=None), [hybrid(0), hybrid(0)]),
}


PREDICTED = {"predicts_values": True}
# With rows of different bytes by layer, without first tokens, with gains of a key norm, of earlier layers, and with
# values that keys predict.
IN_BITS = {
    "llama_rows": (lambda: LlamaConfig(**SHAPE), ROWS),
    "mistral_rows": (lambda: MistralConfig(**SHAPE, sliding_window=None), [{**ROWS[1], "first_tokens": 0}] * 2),
    "qwen2_rows": (lambda: Qwen2Config(**SHAPE), ROWS[::-1]),
    "qwen3_rows": (lambda: Qwen3Config(**SHAPE, head_dim=16), [{**entry, "key_norm_eps": 1e-6} for entry in ROWS]),
    "llama_head_rows": (lambda: LlamaConfig(**SHAPE), HEAD_ROWS[:1] * 2),
    "qwen3_head_rows": (lambda: Qwen3Config(**SHAPE, head_dim=16), [{**HEAD_ROWS[1], "key_norm_eps": 1e-6}] * 2),
    "mistral_predicted_rows": (
        lambda: MistralConfig(**SHAPE, sliding_window=None),
        [{**ROWS[0], **PREDICTED}, ROWS[1]],
    ),
    "qwen3_predicted_head_rows": (
        lambda: Qwen3Config(**SHAPE, head_dim=16),
        [{**HEAD_ROWS[1], "key_norm_eps": 1e-6, **PREDICTED}] * 2,
    ),
    "llama_low_rank_rows": (lambda: LlamaConfig(**SHAPE), CASCADE[::3]),
    "llama_heads_apart_rows": (lambda: LlamaConfig(**SHAPE), [HEADS_APART] * 2),
    "llama_cascade_rows": (lambda: LlamaConfig(**SHAPE | {"num_hidden_layers": 4}), CASCADE),
    "mistral_cascade_rows": (
        lambda: MistralConfig(**SHAPE, sliding_window=None),
        cascade_rows(*GROUP[:2], first_tokens=0),
    ),
    "qwen2_cascade_rows": (lambda: Qwen2Config(**SHAPE), CASCADE[:2]),
    "qwen3_cascade_rows": (lambda: Qwen3Config(**SHAPE | {"num_hidden_layers": 4}, head_dim=16), CASCADE),
}


TWO_STEPS = "qwen2_rows"
"""Model in bits whose steps no kernel reads."""


def cached_numbers(name: str) -> int:
    """Per token, of all layers."""
    base, entries = SOURCES[name][0](), SOURCES[name][1]
    numbers = 0
    for entry in entries:
        if entry is not None and entry["kind"] == "low_rank":
            numbers += sum(block["rank"] for block in entry["blocks"])
        elif entry in HEADS:
            numbers += 2 * 32 * (base.num_key_value_heads if entry is None else entry["kv_heads"])
        else:
            gains = 0 if entry["key_norm_eps"] is None else base.num_key_value_heads
            numbers += entry["kv_lora_rank"] + 2 * len(entry["rope_inv_freq"]) + gains
    return numbers


def changed(path: Path, folder: Path, **fields) -> Path:
    """A copy whose config.json says something else."""
    shutil.copytree(path, folder, dirs_exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def rotate_as_heads(attention: QuantizedLatentAttention) -> None:
    """Weights whose keys can be rotated as heads: half-rotation of a head's channels, groups of heads alike."""
    heads, dim, rank = *attention.query_up.shape[:2], attention.kv_lora_rank
    groups, pairs = attention.num_kv_heads, dim // 2
    factors = torch.randn(groups, groups, pairs, dtype=torch.complex64) / 4
    query_up = torch.zeros(groups, dim, rank + 2 * groups * pairs)
    for component in range(groups):
        for pair in range(pairs):
            channel_pair = rank + 2 * (component * pairs + pair)
            for channel, turn in ((pair, 1), (pair + pairs, 1j)):
                query_up[:, channel, channel_pair : channel_pair + 2] = torch.view_as_real(
                    factors[:, component, pair] * turn
                )
    attention.query_up.copy_(query_up.repeat_interleave(heads // groups, 0))
    value_up = attention.value_up.unflatten(0, (groups, -1))
    value_up.copy_(value_up[:, :1].expand_as(value_up).clone())


def make(name: str, folder: Path) -> Path:
    """Saves one, with a tokenizer and with biases and norms that are not trivial."""
    torch.manual_seed(0)
    base, entries = (SOURCES | HYBRIDS | IN_BITS)[name]
    model = SurgeryForCausalLM(SurgeryConfig.from_base(base(), entries)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
        for module in model.modules():
            if isinstance(module, TokenQuantizer):
                module.step.uniform_(4, 6).div_(module.highest + 1)
                module.mean.normal_(0, 0.1)
                if module.correcting:
                    module.correction.normal_(0, 0.3)
            if isinstance(module, QuantizedLatentAttention) and "head_rows" in name:
                rotate_as_heads(module)
        for module in model.modules():
            # Kernels want both channels of a rotated pair to have one step, as conversions write them.
            if isinstance(module, QuantizedLatentAttention) and name != TWO_STEPS:
                pairs = module.quantizer.step[module.kv_lora_rank :].view(-1, 2)
                pairs[:, 1] = pairs[:, 0]
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder
