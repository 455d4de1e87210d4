"""Tiny random sources and models of the custom model class that are converted from them without loss."""

import copy
from functools import cache

import torch
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from surgery.model import SurgeryConfig, SurgeryForCausalLM, register

register()

HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 4, 2, 8, 2, 64
LATENT = KV_HEADS * HEAD_DIM
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "initializer_range": 0.2}
SHAPE |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128}
SHAPE |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DENSE = {"intermediate_size": 48}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 24}
FAMILIES = {
    "llama": {**DENSE, "head_dim": HEAD_DIM, "attention_bias": True},
    "mistral": {**DENSE, "head_dim": HEAD_DIM, "sliding_window": 6},
    "qwen2": {**DENSE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {**DENSE, "head_dim": HEAD_DIM, "attention_bias": True, "tie_word_embeddings": True},
    "ministral3": {
        **{**DENSE, "head_dim": HEAD_DIM, "sliding_window": None},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0},
            **{"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4},
        },
    },
    "mixtral": {**EXPERTS, "head_dim": HEAD_DIM, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "head_dim": HEAD_DIM, "num_experts": 4, "moe_intermediate_size": 24},
}
WITH_KEY_NORM = ("qwen3", "qwen3_moe")
FULL_ATTENTION = ("llama", "qwen3", "ministral3", "mixtral", "qwen3_moe")
MOE = ("mixtral", "qwen3_moe")


def tiny_source(family: str, **overrides) -> PreTrainedModel:
    """A copy of a random source model in which every bias and norm matters; random numbers start from seed 0."""
    model = copy.deepcopy(_tiny_source(family, **overrides))
    torch.manual_seed(0)
    return model


@cache
def _tiny_source(family: str, **overrides) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SHAPE | FAMILIES[family] | overrides)
    # transformers' grouped_mm has no fast path on a CPU.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.5)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return model


def latent_attention_tensors(attention: torch.nn.Module, inv_freq: torch.Tensor) -> dict[str, torch.Tensor]:
    """The lossless latent form: rotated pairs of every KV head in the rope part, the rest next to the values.

    Half-split pair (l, l + d/2) of KV head g becomes one interleaved pair; pairs of frequency 0 need no rotation and
    join the latent, which then holds [v ; unrotated k].
    """
    norm = attention.k_norm.weight if hasattr(attention, "k_norm") else torch.ones(HEAD_DIM)
    half = HEAD_DIM // 2
    pairs = [(g, pair) for g in range(KV_HEADS) for pair in range(half)]
    pairs.sort(key=lambda g_and_pair: bool(inv_freq[g_and_pair[1]]))  # the unrotated first, into the latent
    key_dims = [(g, dim) for g, pair in pairs for dim in (pair, pair + half)]
    rows, scale = [g * HEAD_DIM + dim for g, dim in key_dims], norm[[dim for _, dim in key_dims]]
    key, value = attention.k_proj, attention.v_proj
    tensors = {"kv_down.weight": torch.cat((value.weight, key.weight[rows] * scale[:, None]))}
    if key.bias is not None:
        tensors["kv_down.bias"] = torch.cat((value.bias, key.bias[rows] * scale))
    rank = LATENT + 2 * sum(inv_freq[pair] == 0 for _, pair in pairs)
    query_up = torch.zeros(HEADS, HEAD_DIM, LATENT + len(key_dims), dtype=norm.dtype)
    value_up = torch.zeros(HEADS, HEAD_DIM, rank, dtype=norm.dtype)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        value_up[head, :, group * HEAD_DIM : (group + 1) * HEAD_DIM] = torch.eye(HEAD_DIM)
        for column, (g, dim) in enumerate(key_dims):
            query_up[head, dim, LATENT + column] = float(g == group)
    return {**tensors, "query_up": query_up, "value_up": value_up}


def lossless_config(source: PreTrainedModel, **overrides) -> SurgeryConfig:
    inv_freq = source.model.rotary_emb.inv_freq.tolist() * KV_HEADS
    rotated = [frequency for frequency in inv_freq if frequency != 0]
    eps = source.config.rms_norm_eps if source.config.model_type in WITH_KEY_NORM else None
    rank = LATENT + 2 * (len(inv_freq) - len(rotated))
    layer = {"kind": "latent", "kv_lora_rank": rank, "rope_inv_freq": rotated, "key_norm_eps": eps}
    return SurgeryConfig.from_base(source.config, [dict(layer) for _ in range(LAYERS)], **overrides)


def lossless_tensors(source: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exchange the attention's tensors in a state dict or checkpoint of the source, and touch nothing else."""
    removed = ("self_attn.v_proj.", "self_attn.k_norm.")
    if source.config.model_type not in WITH_KEY_NORM:
        removed += ("self_attn.k_proj.",)
    result = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in removed)}
    for index, layer in enumerate(source.model.layers):
        for name, tensor in latent_attention_tensors(layer.self_attn, source.model.rotary_emb.inv_freq).items():
            result[f"model.layers.{index}.self_attn.{name}"] = tensor.detach().clone()
    return result


def lossless_model(source: PreTrainedModel, **overrides) -> SurgeryForCausalLM:
    model = SurgeryForCausalLM(lossless_config(source, experts_implementation="eager", **overrides)).to(source.dtype)
    model.load_state_dict(lossless_tensors(source, source.state_dict()), strict=True)
    return model.eval()


def through_cache(model, ids, padding, chunks) -> torch.Tensor:
    """Logits of a text that comes in chunks, its rows starting with padding."""
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]).long()
    logits, cache, first = [], None, 0
    for size in chunks:
        output = model(ids[:, first : first + size], attention_mask=mask[:, : first + size], past_key_values=cache)
        logits.append(output.logits)
        cache, first = output.past_key_values, first + size
    return torch.cat(logits, dim=1)


def agree(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def decode(model: PreTrainedModel, cache: Cache, prompt: int = 5, batch: int = 2) -> torch.Tensor:
    """Logits of `tokens(batch)`, a prompt in one piece and the rest token by token."""
    pieces = tokens(batch).split((prompt, *[1] * (tokens().shape[1] - prompt)), dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def low_rank_entry(rank: int = 2 * LATENT, **overrides) -> dict:
    heads = list(range(KV_HEADS))
    block = {"rank": rank, "keys": heads, "values": heads}
    entry = {"kind": "low_rank", "blocks": [block], "shared_layers": 0, "shared_rank": 0, "sinks": 0, "window": 0}
    return entry | overrides


def lossless_low_rank(source: PreTrainedModel, entries: list[dict] | None = None, **overrides) -> SurgeryForCausalLM:
    """Latents that are an invertible mixture of keys and values; what earlier layers share is read with zero weight."""
    entries = entries or [low_rank_entry() for _ in range(LAYERS)]
    config = SurgeryConfig.from_base(source.config, entries, experts_implementation="eager", **overrides)
    model = SurgeryForCausalLM(config).to(source.dtype)
    generator = torch.Generator().manual_seed(3)
    tensors = source.state_dict()
    for index, entry in enumerate(entries):
        prefix = f"model.layers.{index}.self_attn."
        original = {
            name: tensors.pop(prefix + name) if not entry["window"] else tensors[prefix + name]
            for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
            if prefix + name in tensors
        }
        rows = {"keys": original["k_proj.weight"].view(KV_HEADS, HEAD_DIM, -1)}
        rows["values"] = original["v_proj.weight"].view(KV_HEADS, HEAD_DIM, -1)
        down = []
        for number, block in enumerate(entry["blocks"]):
            stacked = torch.cat([rows[kind][block[kind]].flatten(0, 1) for kind in ("keys", "values")])
            mixing = torch.linalg.qr(torch.randn(len(stacked), len(stacked), generator=generator))[0].to(stacked)
            down.append(mixing @ stacked)
            up = torch.cat([mixing.new_zeros(len(stacked), entry["shared_rank"]), mixing.mT], dim=1)
            split = len(block["keys"]) * HEAD_DIM
            for kind, part in (("key", up[:split]), ("value", up[split:])):
                if len(part):
                    tensors[f"{prefix}{kind}_up.{number}"] = part
        tensors[f"{prefix}kv_down.weight"] = torch.cat(down)
        for name in "kv":
            if f"{name}_proj.bias" in original:
                tensors[f"{prefix}{'key' if name == 'k' else 'value'}_bias"] = original[f"{name}_proj.bias"]
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def _apart() -> list[dict]:
    """Blocks of keys and of values of one head each, in no order."""
    parts = [("keys", 1), ("values", 0), ("keys", 0), ("values", 1)]
    return [{"rank": HEAD_DIM, "keys": [], "values": [], kind: [head]} for kind, head in parts]


def lossless_blocks(source: PreTrainedModel) -> SurgeryForCausalLM:
    return lossless_low_rank(source, [low_rank_entry(blocks=_apart()) for _ in range(LAYERS)])


def lossless_window(source: PreTrainedModel) -> SurgeryForCausalLM:
    return lossless_low_rank(source, [low_rank_entry(window=3, sinks=2) for _ in range(LAYERS)])


def lossless_shared(source: PreTrainedModel) -> SurgeryForCausalLM:
    second = low_rank_entry(shared_layers=1, shared_rank=2 * LATENT)
    return lossless_low_rank(source, [low_rank_entry(), second])


def lossless_grouped(source: PreTrainedModel) -> SurgeryForCausalLM:
    """A KV head for every query head in the first layer, the source's attention in the second."""
    config = SurgeryConfig.from_base(
        source.config, [{"kind": "grouped", "kv_heads": HEADS}, None], experts_implementation="eager"
    )
    model = SurgeryForCausalLM(config).to(source.dtype)
    tensors = source.state_dict()
    for name in [name for name in tensors if "layers.0.self_attn" in name and ("k_proj" in name or "v_proj" in name)]:
        heads = tensors[name].unflatten(0, (KV_HEADS, HEAD_DIM))
        tensors[name] = heads.repeat_interleave(HEADS // KV_HEADS, dim=0).flatten(0, 1)
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def hybrid_entry(full: int, order: list[int], **overrides) -> dict:
    """Sinks and a window that hold all texts of these tests, unless `overrides` say otherwise."""
    entry = {"kind": "hybrid", "kv_heads": len(order), "full_heads": full}
    return entry | {"sinks": 8, "recent": 40, "head_order": order} | overrides


def hybrid_model(source: PreTrainedModel, entries: list[dict | None], **overrides) -> SurgeryForCausalLM:
    """The source with its heads in the order that the entries say."""
    config = SurgeryConfig.from_base(source.config, entries, experts_implementation="eager", **overrides)
    model = SurgeryForCausalLM(config).to(source.dtype)
    tensors = source.state_dict()
    for index, entry in enumerate(entries):
        for name in [name for name in tensors if entry and f"layers.{index}.self_attn." in name and "norm" not in name]:
            # Output columns go as query rows do.
            dim = 1 if "o_proj.weight" in name else 0
            if "o_proj.bias" not in name:
                heads = tensors[name].unflatten(dim, (len(entry["head_order"]), -1))
                tensors[name] = heads.index_select(dim, torch.tensor(entry["head_order"])).flatten(dim, dim + 1)
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def lossless_hybrid(source: PreTrainedModel) -> SurgeryForCausalLM:
    return hybrid_model(source, [hybrid_entry(1, [1, 0]), hybrid_entry(0, [1, 0])])


def streaming_latent_config(source: PreTrainedModel, sinks: int, recent: int, **overrides) -> SurgeryConfig:
    """Return `lossless_config` with a last layer that streams."""
    entries = lossless_config(source).attention_layers
    entries[-1]["streaming"] = {"sinks": sinks, "recent": recent}
    return SurgeryConfig.from_base(source.config, entries, experts_implementation="eager", **overrides)


def lossless_streaming_latent(source: PreTrainedModel, sinks: int = 8, recent: int = 40, **overrides):
    model = SurgeryForCausalLM(streaming_latent_config(source, sinks, recent, **overrides)).to(source.dtype)
    model.load_state_dict(lossless_tensors(source, source.state_dict()), strict=True)
    return model.eval()


def streaming_blocks_entries(sinks: int = 8, recent: int = 40) -> list[dict]:
    """The second KV head streams in the first layer, all heads do in the second."""
    streaming = {"sinks": sinks, "recent": recent}
    first = low_rank_entry(blocks=_apart(), streaming={"blocks": [3, 0], **streaming})
    return [first, low_rank_entry(streaming={"blocks": [0], **streaming})]


def lossless_streaming_blocks(source: PreTrainedModel) -> SurgeryForCausalLM:
    return lossless_low_rank(source, streaming_blocks_entries())


KINDS = {
    "latent": lossless_model,
    "low_rank": lossless_low_rank,
    "blocks": lossless_blocks,
    "window": lossless_window,
    "shared": lossless_shared,
    "grouped": lossless_grouped,
    "hybrid": lossless_hybrid,
    "streaming_latent": lossless_streaming_latent,
    "streaming_blocks": lossless_streaming_blocks,
}
"""Makes a model that computes what its source does, by the kind of its attention."""
OWN_CACHE = ("window", "hybrid", "streaming_latent", "streaming_blocks")
"""Kinds whose cache holds some tokens in another form or not at all: windows of the source's own are refused."""
