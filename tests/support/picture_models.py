"""Tiny random multimodal models with the demo model's tokenizer, and a prompt with a picture for each."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from config_files import config_of, edit_config
from safetensors.torch import load_file, save_file
from tiny_models import (
    LATENT,
    LATENT_EXPERTS,
    LATENT_YARN,
    LLAMA4,
    LLAMA4_VISION,
    SHAPE,
    SHARED_EXPERT,
    STATE_IN_LAYER_0,
    VISION,
    WINDOW_IN_LAYER_0,
    add_tokenizer,
)
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache, PreTrainedModel

IMAGE = 4000
"""The token in the place of what a picture gives."""
SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "llama_4_scaling_beta": 0.1}
SCALED |= {"original_max_position_embeddings": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
MARKS = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1}
MARKS |= {"vision_start_token_id": IMAGE + 2, "vision_end_token_id": IMAGE + 3}
# More numbers are cached of a token than it has, so that half of them hold all.
NARROW = {**SHAPE, "hidden_size": 16, "head_dim": 16}
ROPE_BY_WINDOW = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
STATEFUL = {**NARROW, **STATE_IN_LAYER_0, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}}
QWEN_VISION = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
QWEN_VISION |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
DEEPSTACK = {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]}
CONFIGS = {
    "llava": lambda: hf.LlavaConfig(
        text_config=hf.LlamaConfig(**SHAPE), vision_config=hf.CLIPVisionConfig(**VISION), image_token_index=IMAGE
    ),
    "llava_next": lambda: hf.LlavaNextConfig(
        text_config=hf.MistralConfig(**SHAPE, sliding_window=None),
        vision_config=hf.CLIPVisionConfig(**VISION),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "llama4": lambda: hf.Llama4Config(
        text_config={**LLAMA4, "num_local_experts": 2, "use_qk_norm": False},
        vision_config=hf.Llama4VisionConfig(**LLAMA4_VISION),
        image_token_index=IMAGE,
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=hf.MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
        vision_config=hf.PixtralVisionConfig(**VISION),
        image_token_index=IMAGE,
    ),
    "mistral3 of ministral3": lambda: hf.Mistral3Config(
        text_config=hf.Ministral3Config(**SHAPE, head_dim=16, rope_parameters=SCALED),
        vision_config=hf.PixtralVisionConfig(**VISION),
        image_token_index=IMAGE,
    ),
    "mistral3 of mistral4": lambda: hf.Mistral3Config(
        text_config=hf.Mistral4Config(
            **{**LATENT, **LATENT_EXPERTS, "q_lora_rank": 20, "first_k_dense_replace": 1},
            rope_parameters={
                **LATENT_YARN,
                **SCALED,
                "factor": 4.0,
                "mscale": 0.7,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
        vision_config=hf.PixtralVisionConfig(**VISION),
        image_token_index=IMAGE,
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config={**SHAPE, "rope_parameters": MROPE, "tie_word_embeddings": True},
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        | {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
        | {"fullatt_block_indexes": [1]},
        **MARKS,
        tie_word_embeddings=True,
    ),
    "qwen2_5_vl of many heads": lambda: hf.Qwen2_5_VLConfig(
        text_config={**SHAPE, "num_key_value_heads": 4, "rope_parameters": MROPE},
        vision_config={**QWEN_VISION, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        **MARKS,
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config={**NARROW, **WINDOW_IN_LAYER_0, "query_pre_attn_scalar": 40, "rope_parameters": ROPE_BY_WINDOW},
        vision_config=VISION,
        **{"mm_tokens_per_image": 4, "image_token_index": IMAGE},
        **{"boi_token_index": IMAGE + 1, "eoi_token_index": IMAGE + 2},
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**NARROW, "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]}},
        vision_config=DEEPSTACK,
        **MARKS,
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        text_config={
            **{**NARROW, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"mlp_only_layers": [1], "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]}},
        },
        vision_config=DEEPSTACK,
        **MARKS,
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(text_config=STATEFUL, vision_config=QWEN_VISION, **MARKS),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeConfig(
        text_config={**STATEFUL, **SHARED_EXPERT}, vision_config=QWEN_VISION, **MARKS
    ),
}
SIZES = {"image_sizes": torch.tensor([[16, 16]])}

GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Models that take pictures as patches, and whose positions have three axes."""
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


def as_early_qwen(folder: Path) -> None:
    """Rewrite a config of Qwen2.5-VL with the language model's fields at the top, as its checkpoints on the hub have
    them."""
    text = config_of(folder)["text_config"]
    sections = text.pop("rope_parameters")["mrope_section"]
    text |= {"model_type": "qwen2_5_vl", "rope_theta": 1e4}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": sections}
    edit_config(folder, "text_config", "rope_parameters", **text)


def make_model(folder: Path, name: str) -> Path:
    """Saves a tiny random model with biases and norms that are not trivial, and a tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name]())
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, 0.2)
        elif name.split()[0] in GRIDS and "norm" in key and "layers" in key:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif key.endswith("projection_weight"):  # of Gemma 3, zeros at first
            torch.nn.init.normal_(parameter, 0, 0.2)
    # Names as checkpoints of the hub have them, and those of the class.
    model.save_pretrained(folder, save_original_format="mistral3" not in name)
    if name == "qwen3_vl_moe":  # experts as published, which transformers takes and does not write
        stored = load_file(folder / "model.safetensors")
        turned = {key: tensor.mT.contiguous() for key, tensor in stored.items() if ".experts." in key}
        save_file(stored | turned, folder / "model.safetensors", {"format": "pt"})
    add_tokenizer(folder)
    return folder


def picture(name: str) -> tuple[dict[str, Tensor], int]:
    """A random picture as the model takes it, and the tokens that stand for it."""
    random = torch.Generator().manual_seed(1)
    if name.split()[0] in GRIDS:
        patches = torch.randn(24, 3 * 2 * 4 * 4, generator=random)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 6]])}, 6
    if name == "llava_next":  # a grid of two, and the picture as a whole
        return {"pixel_values": torch.randn(1, 3, 3, 16, 16, generator=random), **SIZES}, 16 + 4 * (4 + 1)
    sizes = {} if name in ("llava", "llama4", "gemma3") else SIZES
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=random), **sizes}, 16 if name == "llava" else 4


def prompt(name: str) -> dict[str, Tensor]:
    """Text with a picture in it."""
    inputs, count = picture(name)
    text = torch.randint(3, IMAGE, (20,), generator=torch.Generator().manual_seed(2))
    start = torch.tensor([IMAGE + 2] if name.split()[0] in GRIDS else [], dtype=torch.long)
    ids = torch.cat([text[:8], start, torch.full((count,), IMAGE), text[8:]])[None]
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    types = {**dict.fromkeys(GRIDS, "mm_token_type_ids"), "gemma3": "token_type_ids"}.get(name.split()[0])
    return inputs | ({types: (ids == IMAGE).int()} if types else {})


def loaded(folder: Path) -> PreTrainedModel:
    """The model of a folder, of which nothing is missing and nothing left over."""
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model.eval()


def check_caches(model: PreTrainedModel, settings: dict[str, Any], *, tolerance: float = 1e-4) -> None:
    """One pass, the same through a cache, and after padding; and the picture is seen."""
    whole = model(**settings).logits
    close = {"rtol": 0, "atol": tolerance * float(whole.abs().max())}
    per_token = [key for key in settings if key in PER_TOKEN]
    cache, first = DynamicCache(config=model.config), {key: settings[key][:, :-3] for key in per_token}
    pieces = [model(**{**settings, **first}, past_key_values=cache).logits]
    pieces += [
        model(input_ids=token, past_key_values=cache).logits for token in settings["input_ids"][:, -3:].split(1, 1)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **close)

    padding = dict.fromkeys(per_token, 0) | {"input_ids": 2}
    padded = {key: torch.nn.functional.pad(settings[key], (5, 0), value=padding[key]) for key in per_token}
    torch.testing.assert_close(model(**{**settings, **padded}).logits[:, 5:], whole, **close)

    other = model(**{**settings, "pixel_values": -settings["pixel_values"]}).logits
    assert float((other - whole).abs().max()) > 10 * 1e-4 * float(whole.abs().max())
