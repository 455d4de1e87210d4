"""The way from gpt-oss in MXFP4, as it is published, to a checkpoint that converts: the one that the refusal names."""

import pytest
import torch
from config_files import edit_config
from conversions import convert_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, add_tokenizer, random_model
from transformers import AutoModelForCausalLM, Mxfp4Config

from surgery.common.errors import SurgeryError
from surgery.structures.kv_heads.settings import KVHeadsSettings

BLOCK = 32
SETTINGS = KVHeadsSettings(calibration="none")


def mxfp4_checkpoint(folder):
    """Random codes and scales in the place of a tiny model's experts."""
    config = CONFIGS["gpt_oss_window"]()
    config.intermediate_size = 2 * BLOCK  # blocks are along the inputs of a projection
    random_model(config).to(torch.bfloat16).save_pretrained(folder)
    tensors, file = {}, folder / "model.safetensors"
    for name, tensor in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = experts, outputs, inputs // BLOCK
            tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, BLOCK // 2), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(122, 126, blocks, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})
    entries = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": entries})


@pytest.mark.slow
@torch.no_grad()
def test_experts_in_mxfp4_become_bfloat16(tmp_path):
    packed, plain = tmp_path / "mxfp4", tmp_path / "bf16"
    mxfp4_checkpoint(packed)
    with pytest.raises(SurgeryError, match=r"Mxfp4Config\(dequantize=True\).*save_original_format=False"):
        convert_checkpoint(packed, tmp_path / "out", SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(
        packed, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(plain, save_original_format=False)
    add_tokenizer(plain)
    tokens = torch.randint(3, 4096, (1, 30), generator=torch.Generator().manual_seed(0))
    again = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    convert_checkpoint(plain, tmp_path / "out", SETTINGS)
