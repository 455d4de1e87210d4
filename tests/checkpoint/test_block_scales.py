"""fp8 weights with scales by block: against transformers' own arithmetic, and a block at a time."""

import json

import pytest
import torch
from conversions import convert_checkpoint
from quantized_checkpoints import BLOCK, make_quantized
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.structures.mla.settings import ConvertSettings


@pytest.fixture
def checkpoint(tmp_path):
    """DeepSeek-V3 with every matrix of its layers in fp8, but norms, router and vocabulary."""
    return make_quantized(tmp_path / "source", "deepseek_v3", "FP8")


def test_the_numbers_are_those_of_transformers_and_of_each_block(checkpoint):
    stored, reader = load_file(checkpoint / "model.safetensors"), CheckpointReader.open(checkpoint)
    assert reader.dequantised_from == "FP8" and "quantization_config" not in reader.config
    assert not [name for name in reader.names() if "scale" in name]
    partial = 0
    for name in reader.names():
        if name + "_scale_inv" not in stored:
            assert torch.equal(reader.tensor(name), stored[name])
            continue
        weight, scales, result = stored[name].float(), stored[name + "_scale_inv"], reader.tensor(name)
        want = weight.clone()
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                block = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
                want[block] *= scales[row, column]
        assert result.dtype == torch.bfloat16 and torch.equal(result, want.bfloat16())
        if weight.shape[0] % BLOCK or weight.shape[1] % BLOCK:
            partial += 1
        else:
            assert torch.equal(result, Fp8Dequantize(None)._dequantize_one(stored[name], scales, torch.bfloat16))
        rows = torch.tensor([weight.shape[0] - 1, 0, 3])
        assert torch.equal(reader.rows(name, rows), result[rows])
    assert partial  # 24 rows of what makes the latent


def test_a_conversion_dequantizes_and_says_so(checkpoint, tmp_path):
    report = convert_checkpoint(checkpoint, tmp_path / "out", ConvertSettings(calibration="none")).report.to_dict()
    assert report["source"]["dequantised_from"] == "FP8"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    files, reader = load_file(tmp_path / "out" / "model.safetensors"), CheckpointReader.open(checkpoint)
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert torch.equal(files[expert], reader.tensor(expert)) and not [name for name in files if "scale" in name]


def test_scales_that_do_not_fit_are_refused(checkpoint, tmp_path):
    tensors, name = load_file(checkpoint / "model.safetensors"), "model.layers.0.self_attn.o_proj.weight"
    save_file(tensors | {name + "_scale_inv": torch.ones(1, 1)}, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        SurgeryError, match=r"o_proj.weight: float8_e4m3fn .* does not fit its scales, float32 \[1, 1\]"
    ):
        convert_checkpoint(checkpoint, tmp_path / "out", ConvertSettings(calibration="none"))
    del tensors[name + "_scale_inv"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(SurgeryError, match=r"o_proj.weight: float8_e4m3fn .* has no scales"):
        convert_checkpoint(checkpoint, tmp_path / "out", ConvertSettings(calibration="none"))
    assert not (tmp_path / "out").exists()


def test_other_quantized_weights_of_mla_models_are_refused(checkpoint, tmp_path):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "bitnet"}}))
    with pytest.raises(SurgeryError, match=r"the weights are quantized \(bitnet\)"):
        convert_checkpoint(checkpoint, tmp_path / "out", ConvertSettings(calibration="none"))
