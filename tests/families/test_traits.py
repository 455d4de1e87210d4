"""Sinks, output gates and layers without RoPE of a family that only its family file names."""

from dataclasses import replace

import pytest
import torch
from conversions import convert_checkpoint
from decoding import in_pieces
from tiny_models import CONFIGS, SHORT_TEXT, add_tokenizer, random_model, tokens
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
)

from surgery.common.errors import SurgeryError
from surgery.families import FAMILIES
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings

STRUCTURES = {
    "mla": ConvertSettings(**SHORT_TEXT, kv_ratio=0.5, allocate="uniform"),
    "lowrank": LowRankSettings(**SHORT_TEXT, kv_ratio=0.5),
    "crosslayer": CrossLayerSettings(**SHORT_TEXT, group_size=2),
    "hybrid": HybridSettings(calibration="none", streaming=1.0, sinks=2, recent=6),
}
FULL = ["full_attention"] * 2
NEW = {
    "sinks": ("gpt_oss", {}),
    "gate": ("qwen3_next_state", {"layer_types": FULL}),
    "no RoPE": ("cohere2_window", {"sliding_window": 64}),
}
"""Model under another ``model_type``, and its changed fields: its tests in the matrix are under its own."""


@pytest.fixture
def new_family(monkeypatch, tmp_path):
    """Return a function that makes a checkpoint of a family that the model code does not name."""

    def make(part: str):
        name, changed = NEW[part]
        stock = type(CONFIGS[name]())
        model_type = f"new_{stock.model_type}"
        config_class = type(f"New{stock.__name__}", (stock,), {"model_type": model_type})
        AutoConfig.register(model_type, config_class, exist_ok=True)
        for auto, mapping in ((AutoModel, MODEL_MAPPING), (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)):
            of = mapping[stock]
            auto.register(config_class, type(f"New{of.__name__}", (of,), {"config_class": config_class}), exist_ok=True)
        monkeypatch.setitem(FAMILIES._own, model_type, replace(FAMILIES[stock.model_type], model_type=model_type))
        values = {key: value for key, value in CONFIGS[name]().to_dict().items() if key != "model_type"}
        source = tmp_path / "source"
        random_model(config_class(**values | changed)).save_pretrained(source)
        add_tokenizer(source)
        return source

    return make


@pytest.mark.parametrize(
    ("part", "to"),
    [("sinks", "mla"), ("sinks", "crosslayer"), ("gate", "lowrank"), ("gate", "mla"), ("no RoPE", "lowrank")],
)
@torch.no_grad()
def test_a_family_file_suffices(new_family, tmp_path, part, to):
    result = convert_checkpoint(new_family(part), tmp_path / "out", STRUCTURES[to])
    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    written = {"no RoPE": [1, 0]}.get(part)
    assert getattr(model.config, "no_rope_layers", None) == written
    whole = model(tokens(2, 24), use_cache=False).logits
    pieces, _ = in_pieces(model, tokens(2, 24))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("part", ["sinks", "gate"])
def test_streaming_heads_refuse_what_they_leave_out(new_family, tmp_path, part):
    source = new_family(part)
    with pytest.raises(SurgeryError) as refusal:
        convert_checkpoint(source, tmp_path / "out", STRUCTURES["hybrid"])
    assert refusal.value.path == source
    assert not (tmp_path / "out").exists()
