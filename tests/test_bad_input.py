"""Bad input gets one clear line, and leaves the disk as it was.

Here a conversion meets a few kinds of it; tests/checkpoint/test_reader_errors.py has those of files, and
tests/test_source_check.py those of configs.
"""

import shutil
from functools import partial

import pytest
import torch
from config_files import edit_config
from conversions import convert_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import SHORT_TEXT

from surgery.common.errors import SurgeryError
from surgery.structures.mla.settings import ConvertSettings

QUICK = {**SHORT_TEXT, "rope_dim": 4, "kv_ratio": 0.5}


def poison(name):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[3] = float("nan")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def pickle_only(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def quantized(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 16, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "quip"})


CASES = {
    "truncated": (truncate, {}, "truncated|shorter|bytes"),
    "NaN in attention": (poison("model.layers.1.self_attn.k_proj.weight"), {}, "attn.k_proj.weight contains NaN"),
    "NaN elsewhere": (poison("model.layers.0.mlp.up_proj.weight"), {}, "up_proj|layer 0|not finite|NaN"),
    "unknown model_type": (partial(edit_config, model_type="gemma4"), {}, "model_type 'gemma4' is not supported"),
    "quantized": (quantized, {}, "quantized .quip."),
    "partial rotary": (
        partial(edit_config, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        {},
        "partial_rotary_factor",
    ),
    "layers of no known number": (
        partial(edit_config, layer_types=["full_attention"] * 3),
        {},
        r"config\.json: transformers cannot load it .*num_hidden_layers",
    ),
    "text where a number belongs": (
        partial(edit_config, hidden_size="wide"),
        {},
        r"config\.json: hidden_size must be a whole number from 1 to 1,048,576, not 'wide'",
    ),
    "pickle only": (pickle_only, {}, "Pickled weights .* are not read"),
    "budget too small": (lambda folder: None, {"kv_ratio": 0.01, "rope_dim": None}, "raise kv_ratio"),
    "budget too large": (lambda folder: None, {"kv_ratio": None, "kv_lora_rank": 64, "rope_dim": 8}, "are not fewer"),
    "rope too wide": (lambda folder: None, {"rope_dim": 64}, "not possible|budget"),
    "values of a stock class": (lambda folder: None, {"predict_values": True}, "pass --bits auto"),
    "absent text": (lambda folder: None, {"calibration": "nowhere.txt"}, "nowhere.txt"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), {}, "tokenizer"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line_and_a_clean_disk(case, checkpoints, tmp_path):
    edit, changes, message = CASES[case]
    source = shutil.copytree(checkpoints("llama"), tmp_path / "src")
    edit(source)
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(SurgeryError, match=message) as caught:
        convert_checkpoint(source, tmp_path / "out", ConvertSettings(**{**QUICK, **changes}))
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    assert sorted(path.name for path in source.iterdir()) == before
