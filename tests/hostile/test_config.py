"""config.json that nobody meant well with: looked at as `surgery inspect` does, or refused in one line."""

import json

import pytest
from hostile import cases, mutated, taken_or_refused
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_checkpoint

from surgery.checkpoint.config_file import LIMITS
from surgery.common.errors import SurgeryError
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.mla.settings import ConvertSettings

NAMES = ("llama", "qwen2_window", "qwen3_moe", "phi3_window", "gemma3_window", "smollm3", "glm4", "cohere2_window")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny checkpoints of several families, with their configs."""
    results = {name: make_checkpoint(tmp_path_factory.mktemp("hostile") / name, name) for name in NAMES}
    return {name: (folder, json.loads((folder / "config.json").read_text())) for name, folder in results.items()}


# What was found: each ended in a traceback, or in memory for what was claimed, before it was mended.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FOUND = [
    *(("qwen2_window", {name: 10**15}) for name in LIMITS),
    *(("phi3_window", {name: [64]}) for name in LIMITS if name not in ("vocab_size", "head_dim")),
    *(("phi3_window", {name: None}) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")),
    *(("llama", {"rope_parameters": {**ROPE, "rope_theta": theta}}) for theta in ([], {}, 0, -1.0, 1e-300, 10**400)),
    *(("llama", {"rope_parameters": {**ROPE, "partial_rotary_factor": part}}) for part in ({}, 0, 2.0, float("nan"))),
    ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": {}}}),
    ("llama", {"model_type": ["llama"]}),
    ("llama", {"dtype": []}),
    ("phi3_window", {"rope_parameters": ["default"]}),
    ("smollm3", {"no_rope_layers": []}),
    ("smollm3", {"no_rope_layers": [1]}),
]


@pytest.mark.parametrize(("name", "changes"), FOUND)
def test_found(name, changes, folders):
    folder, config = folders[name]
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SurgeryError, match=r"config\.json"):
        look(folder)


def look(folder):
    opened = Source.of(open_model(folder), ConvertSettings())
    return opened.anatomy(opened.layers - 1), opened.windows


@given(st.data())
@cases(25)
def test_of_a_family(folders, data):
    folder, config = folders[data.draw(st.sampled_from(NAMES))]
    (folder / "config.json").write_text(json.dumps(data.draw(mutated(config))))
    taken_or_refused(lambda: look(folder))
