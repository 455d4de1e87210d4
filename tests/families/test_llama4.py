"""Llama 4 beyond its first chunk, where queries grow by position: converted layers next to those that stay."""

import pytest
import torch
from conversions import convert_checkpoint
from decoding import after_padding, in_pieces
from own_models import low_rank_entry
from tiny_models import CONFIGS, LLAMA4, LLAMA4_VISION, random_model, tokens
from transformers import (
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4VisionConfig,
    PreTrainedModel,
)

from surgery.common.errors import SurgeryError
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings

LAYER, WIDTH = 1, 32
"""The one without rotation, and numbers of its keys."""


def latent(source: PreTrainedModel) -> tuple[dict, dict[str, torch.Tensor]]:
    """Values and keys as one latent, nothing of it rotated."""
    attention = source.model.layers[LAYER].self_attn
    query_up, value_up = torch.zeros(4, 16, 2 * WIDTH), torch.zeros(4, 16, 2 * WIDTH)
    for head in range(4):
        rows = slice(head // 2 * 16, head // 2 * 16 + 16)
        value_up[head, :, rows] = query_up[head, :, WIDTH:][:, rows] = torch.eye(16)
    down = torch.cat([attention.v_proj.weight, attention.k_proj.weight])
    entry = {"kind": "latent", "kv_lora_rank": 2 * WIDTH, "rope_inv_freq": [], "key_norm_eps": None}
    return entry, {"kv_down.weight": down, "query_up": query_up, "value_up": value_up}


def low_rank(source: PreTrainedModel) -> tuple[dict, dict[str, torch.Tensor]]:
    attention = source.model.layers[LAYER].self_attn
    down = torch.cat([attention.k_proj.weight, attention.v_proj.weight])
    key, value = torch.eye(2 * WIDTH).split(WIDTH)
    return low_rank_entry(2 * WIDTH), {"kv_down.weight": down, "key_up.0": key, "value_up.0": value}


@pytest.mark.parametrize("form", [latent, low_rank])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_layer_of_full_rank_is_the_source_far_beyond_a_chunk(form, attention):
    source = random_model(CONFIGS["llama4_window"]()).eval()
    entry, new = form(source)
    entries = [entry if layer == LAYER else None for layer in range(3)]
    model = SurgeryForCausalLM(SurgeryConfig.from_base(source.config, entries)).eval()
    prefix = f"model.layers.{LAYER}.self_attn."
    dropped = tuple(f"{prefix}{name}_proj" for name in "kv")
    remaining = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith(dropped)}
    model.load_state_dict(remaining | {prefix + name: tensor for name, tensor in new.items()}, strict=True)
    for one in (source, model):
        one.set_attn_implementation(attention)

    text = tokens(2, 200)
    want = source(text, use_cache=False).logits
    close = {"rtol": 0, "atol": 1e-5 * float(want.abs().max())}
    torch.testing.assert_close(model(text, use_cache=False).logits, want, **close)
    torch.testing.assert_close(in_pieces(model, text, (70, 90, *[1] * 10, 30))[0], want, **close)
    both = [after_padding(one, text, 7, numbered=False) for one in (source, model)]
    torch.testing.assert_close(*both, **close)

    model.model.config.attn_temperature_tuning = False  # what the layers read
    assert float((model(text, use_cache=False).logits - want)[:, :71].abs().max()) < close["atol"]
    assert float((model(text, use_cache=False).logits - want)[:, 71:].abs().max()) > 100 * close["atol"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer 0 of llama4_text must not have RoPE with full attention"),
        ({"no_rope_layers": [1, 1, 1], "layer_types": None}, "all layers use chunked attention"),
    ],
)
def test_other_layers_than_llama_4_has_are_refused(tmp_path, change, message):
    settings = {**CONFIGS["llama4_window"]().to_dict(), **change}
    config = type(CONFIGS["llama4_window"]())(**{name: value for name, value in settings.items() if value is not None})
    random_model(config).save_pretrained(tmp_path / "source")
    with pytest.raises(SurgeryError, match=message):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", LowRankSettings(calibration="none"))


@pytest.mark.slow
def test_the_text_part_of_a_whole_model_converts(tmp_path):
    text = {**LLAMA4, "num_local_experts": 2}
    whole = Llama4Config(text_config=text, vision_config=Llama4VisionConfig(**LLAMA4_VISION))
    Llama4ForConditionalGeneration(whole).save_pretrained(tmp_path / "whole")
    with pytest.raises(SurgeryError, match="with a q/k-norm"):
        convert_checkpoint(tmp_path / "whole", tmp_path / "out", KVHeadsSettings(calibration="none"))
    Llama4ForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "text")
    result = convert_checkpoint(tmp_path / "text", tmp_path / "out", LowRankSettings(calibration="none"))
    assert result.report.source["model_type"] == "llama4_text"
