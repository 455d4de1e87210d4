"""Tiny models whose layers share a cache."""

import torch
from transformers import PreTrainedModel

from surgery.model import SurgeryConfig, SurgeryForCausalLM, register

register()

LAYERS, WIDTH = 2, 32  # of tiny_source: 2 KV heads of 8 dimensions, keys and values
RECENT = {"block": 4, "sinks": 0, "window": 0}
STATIC = {"kind": "cross_layer", "group_size": 2, "rank": 6, **RECENT}
PAIRS = {"kind": "cross_layer_pairs", "group_size": 2, "kept": 1, "interpolation": 0.6, **RECENT}
PROMPT = {"kind": "cross_layer_prompt", "group_size": 2, "key_rank": 3, "value_rank": 4}
FORMS = {
    "static": STATIC,
    "window": {**STATIC, "block": 3, "sinks": 2, "window": 5},
    "token": {**STATIC, "block": 1},
    "pairs": PAIRS,
}


def shared(source: PreTrainedModel, entry: dict, scale: float = 0.3) -> SurgeryForCausalLM:
    """The source with a random basis of the group."""
    entries = [{**entry, "place": index} for index in range(LAYERS)]
    config = SurgeryConfig.from_base(source.config, entries, experts_implementation="eager")
    model = SurgeryForCausalLM(config)
    info = model.load_state_dict(source.state_dict(), strict=False)
    assert not info.unexpected_keys
    generator = torch.Generator().manual_seed(4)
    for name in info.missing_keys:
        assert "basis" in name
        parameter = model.get_parameter(name)
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()
