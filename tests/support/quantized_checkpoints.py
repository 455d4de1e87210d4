"""Checkpoints with matrices quantized as compressed-tensors and DeepSeek store them."""

from collections.abc import Callable
from pathlib import Path

import torch
from config_files import edit_config
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch import Tensor

BLOCK = 16
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def fp8_by_row(weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST).bfloat16()
    return {"weight": (weight / scale.float()).to(torch.float8_e4m3fn), "weight_scale": scale}


def int8_of_one_scale(weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.abs().max() / 127).bfloat16().view(1)
    return {"weight": (weight / scale.float()).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def fp8_by_block(weight: Tensor) -> dict[str, Tensor]:
    blocks = [rows.split(BLOCK, dim=1) for rows in weight.split(BLOCK)]
    scales = torch.tensor([[float(block.abs().max()) / LARGEST for block in row] for row in blocks])
    rows = [torch.cat([b / s for b, s in zip(row, of, strict=True)], 1) for row, of in zip(blocks, scales, strict=True)]
    return {"weight": torch.cat(rows).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _compressed(kind: str, weights: dict) -> dict:
    weights = {"symmetric": True, "dynamic": False, "group_size": None, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {**group, "format": kind}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FORMATS: dict[str, tuple[dict, Callable[[Tensor], dict[str, Tensor]]]] = {
    "fp8": (_compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), fp8_by_row),
    "int8": (_compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}), int8_of_one_scale),
    "FP8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"},
        fp8_by_block,
    ),
}
"""Formats by name: the config's ``quantization_config``, and the parts of a matrix by their endings."""


def make_quantized(folder: Path, family: str, kind: str) -> Path:
    """A tiny checkpoint in bfloat16 whose projections are quantized: not embeddings, norms, router and output."""
    message, quantize = FORMATS[kind]
    make_checkpoint(folder, family, torch.bfloat16)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"):
            module = name.removesuffix("weight")
            tensors |= {module + part: value.contiguous() for part, value in quantize(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=message)
    return folder
