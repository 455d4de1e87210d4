"""Plain decoders are read as transformers reads them, without its classes; everything else is left to it."""

import json

import pytest
from command_line import launch
from config_files import config_of, edit_config
from tiny_models import CONFIGS, make_checkpoint

from surgery.checkpoint import CheckpointReader
from surgery.inspection import inspect
from surgery.inspection.inspect import inspect_checkpoint
from surgery.running import kv_bytes, source_check
from surgery.running.loading import load_config
from surgery.running.plain_decoder import is_plain, plain_config

PLAIN = ("llama", "llama3", "mistral", "qwen2", "qwen3", "falcon3")
UNREAD = ("use_sliding_window", "attention_bias", "mlp_bias", "pretraining_tp", "max_window_layers", "_name_or_path")
"""Attributes of classes that nothing reads of a plain decoder."""


def written(name: str) -> dict:
    """A family's config as config.json."""
    return json.loads(CONFIGS[name]().to_json_string())


def written_by_version_4(config: dict) -> dict:
    """A config.json as transformers 4 wrote it."""
    rope = dict(config.pop("rope_parameters"))
    theta, scaling = rope.pop("rope_theta"), None if rope == {"rope_type": "default"} else rope
    return {**config, "rope_theta": theta, "rope_scaling": scaling, "torch_dtype": config.pop("dtype")}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_the_config_is_that_of_transformers(name, early, tmp_path):
    path = make_checkpoint(tmp_path / "model", name)
    if early:
        (path / "config.json").write_text(json.dumps(written_by_version_4(config_of(path))))
    plain, stock = plain_config(config_of(path)), load_config(path)
    expected = {key: value for key, value in stock.to_dict().items() if key not in UNREAD}
    assert {key: plain.to_dict().get(key) for key in expected} == expected
    assert hasattr(plain, "head_dim") == hasattr(stock, "head_dim") and is_plain(CheckpointReader.open(path))


def test_no_other_family_is_plain():
    assert [name for name in CONFIGS if plain_config(written(name)) is not None] == list(PLAIN)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES = [
    *({"sliding_window": 16}, {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}),
    *({"quantization_config": {}}, {"layer_types": ["full_attention"] * 2}, {"attn_logit_softcapping": 5.0}),
    *({"num_hidden_layers": "2"}, {"num_attention_heads": 3}, {"num_key_value_heads": 3}, {"hidden_size": None}),
    *({"rms_norm_eps": float("nan")}, {"tie_word_embeddings": 1}, {"dtype": "float64"}, {"dtype": []}),
    *({"rope_parameters": {**ROPE, "rope_type": kind}} for kind in ("dynamic", "yarn", "longrope", None, [])),
    *({"rope_parameters": {**ROPE, name: 0.5}} for name in ("partial_rotary_factor", "unknown")),
    *({"rope_parameters": value} for value in ({"rope_type": "default"}, ["default"], {**ROPE, "rope_theta": "1"})),
    *({"architectures": names} for names in (["MistralForCausalLM"], [], "LlamaForCausalLM")),
    *({"model_type": name} for name in ("mistral", "granite", None, ["llama"])),
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_a_config_says_in_addition_is_left_to_transformers(change):
    config = written("llama")
    assert plain_config(config) is not None and plain_config({**config, **change}) is None


@pytest.mark.parametrize("key", ["num_key_value_heads", "rms_norm_eps", "hidden_act", "vocab_size", "rope_parameters"])
def test_what_a_config_leaves_out_is_left_to_transformers(key):
    config = written("llama")
    config.pop(key)
    assert plain_config(config) is None


@pytest.mark.parametrize("name", PLAIN)
def test_inspection_says_the_same_by_the_classes(name, tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path / "model", name)
    plain = inspect_checkpoint(path).to_dict()
    kv_bytes._custom_config.cache_clear()
    for module, names in ((inspect, ("plain_config",)), (kv_bytes, ("plain_config", "plain_converted_config"))):
        for each in names:
            monkeypatch.setattr(module, each, lambda config: None)
    monkeypatch.setattr(source_check, "is_plain", lambda reader: False)
    assert inspect_checkpoint(path).to_dict() == plain
    kv_bytes._custom_config.cache_clear()


# What takes seconds to import, and nothing that describes a checkpoint.
IMPORTS = """
import sys
from surgery.cli.program import main
try:
    main()
except SystemExit:
    pass
heavy = ("core_model_loading", "modeling_utils", "generation.utils", "activations", "models.llama")
print([name for name in heavy if f"transformers.{name}" in sys.modules], "torch._dynamo" in sys.modules)
"""


def test_inspect_imports_no_class_of_transformers():
    process = launch("inspect", "builtin", code=IMPORTS)
    assert process.returncode == 0, process.stderr
    assert "--to lowrank" in process.stdout and process.stdout.splitlines()[-1] == "[] False"


def test_a_damaged_one_is_compared_with_its_class(tmp_path):
    path = make_checkpoint(tmp_path / "model", "llama")
    edit_config(path, intermediate_size=64)
    assert plain_config(config_of(path)) is not None and not is_plain(CheckpointReader.open(path))
