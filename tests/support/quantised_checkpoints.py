"""Checkpoints with matrices quantised as compressed-tensors and DeepSeek store them, packed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch import Tensor

GROUP, BLOCK = 8, 16
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [R, C] in int32, one number behind the other."""
    per_word, unsigned = 32 // bits, (codes + 2 ** (bits - 1)).long()
    rows = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % per_word)).view(len(codes), -1, per_word)
    words = sum(rows[..., place] << (place * bits) for place in range(per_word))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def int_packed(weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    grouped, largest = weight.view(len(weight), -1, group), 2 ** (bits - 1) - 1
    scale = (grouped.abs().amax(-1) / largest).bfloat16()
    codes = (grouped / scale.float()[..., None]).round().clamp(-largest - 1, largest).view_as(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": packed(codes.int(), bits), "weight_scale": scale, "weight_shape": shape}


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
    "int4": (
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
        lambda weight: int_packed(weight, 4, GROUP),
    ),
    "int8": (
        _compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        lambda weight: int_packed(weight, 8, weight.shape[1]),
    ),
    "fp8": (
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        fp8_by_row,
    ),
    "int8 plain": (
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
        int8_of_one_scale,
    ),
    "FP8": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
        fp8_by_block,
    ),
}
"""By name: the config's ``quantization_config``, and the parts of a matrix by their endings."""


def make_quantised(folder: Path, family: str, kind: str) -> Path:
    """A tiny checkpoint in bfloat16 whose projections are quantised: not embeddings, norms, router and output."""
    said, quantise = FORMATS[kind]
    make_checkpoint(folder, family, torch.bfloat16)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"):
            module = name.removesuffix("weight")
            tensors |= {module + part: value.contiguous() for part, value in quantise(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=said)
    return folder


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
