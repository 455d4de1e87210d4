"""config.json that nobody meant well with: looked at as `surgery inspect` does, or refused in one line."""

import json

import pytest
from conversions import convert_checkpoint
from hostile import cases, damaged, mutated, taken_or_refused
from hypothesis import given
from hypothesis import strategies as st
from picture_models import make_model
from tiny_models import make_checkpoint
from written_models import WRITTEN

from surgery.checkpoint.config_file import LIMITS
from surgery.common.errors import SurgeryError
from surgery.inspection.inspect import inspect_checkpoint
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings

NAMES = ("llama", "qwen2_window", "qwen3_moe", "phi3_window", "gemma3_window", "smollm3", "glm4", "cohere2_window")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny checkpoints of several families, with their configs."""
    results = {name: make_checkpoint(tmp_path_factory.mktemp("hostile") / name, name) for name in NAMES}
    return {name: (folder, json.loads((folder / "config.json").read_text())) for name, folder in results.items()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Converted ones: stock MLA, the custom class, one whose layers keep different caches, and one next to pictures."""
    root, result = tmp_path_factory.mktemp("hostile"), {}
    source, pictures = make_checkpoint(root / "llama", "llama"), make_model(root / "llava", "llava")
    quick = {"calibration": "none", "kv_ratio": 0.5}
    options = {
        "mla": (source, ConvertSettings(**quick)),
        "lowrank": (source, LowRankSettings(**quick)),
        "pictures": (pictures, LowRankSettings(**quick)),
    }
    for name, (checkpoint, settings) in options.items():
        folder = convert_checkpoint(checkpoint, root / name, settings).path
        result[name] = folder, json.loads((folder / "config.json").read_text())
    model = WRITTEN["mixed"]()  # as earlier versions wrote it
    model.save_pretrained(root / "mixed")
    result["mixed"] = root / "mixed", json.loads((root / "mixed" / "config.json").read_text())
    assert (
        isinstance(result["mixed"][1]["kv_cache"], list) and result["pictures"][1]["model_type"] == "surgery_pictures"
    )
    return result


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


@given(st.data())
@cases(1, limit=500)
def test_inspected(folders, data):
    folder, config = folders[data.draw(st.sampled_from(NAMES))]
    (folder / "config.json").write_text(json.dumps(data.draw(mutated(config))))
    taken_or_refused(lambda: inspect_checkpoint(folder))


@given(st.data())
@cases(8, limit=2000)
def test_of_a_conversion(converted, data):
    folder, config = converted[data.draw(st.sampled_from(sorted(converted)))]
    (folder / "config.json").write_text(json.dumps(data.draw(mutated(config))))
    taken_or_refused(lambda: inspect_checkpoint(folder))


@given(st.data())
@cases(12)
def test_bytes(folders, data):
    folder, config = folders["llama"]
    (folder / "config.json").write_bytes(data.draw(damaged(json.dumps(config).encode()) | st.binary(max_size=64)))
    taken_or_refused(lambda: look(folder))
