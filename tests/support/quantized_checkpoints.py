"""Checkpoints with matrices quantized as compressed-tensors and DeepSeek store them, packed by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from config_files import edit_config
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch import Tensor

GROUP, BLOCK = 8, 16
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [R, C] in int32, one number after the other."""
    per_word, unsigned = 32 // bits, (codes + 2 ** (bits - 1)).long()
    rows = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % per_word)).view(len(codes), -1, per_word)
    words = sum(rows[..., index] << (index * bits) for index in range(per_word))
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


def words(codes: list[list[int]], bits: int) -> Tensor:
    """Codes of each row in int32, the bits of all as one long number."""
    count = -(-len(codes[0]) * bits // 32)
    numbers = [sum(code << (bits * index) for index, code in enumerate(row)) for row in codes]
    rows = [[number >> (32 * index) & 0xFFFFFFFF for index in range(count)] for number in numbers]
    return torch.tensor([[word - 2**32 * (word >= 2**31) for word in row] for row in rows], dtype=torch.int32)


def with_zeros(weight: Tensor, bits: int, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize inputs in groups [I]: codes [O, I], scales [G, O] in float16, zeros [G, O], and their values [O, I]."""
    top, scales, zeros = 2**bits - 1, [], []
    for each in range(int(group.max()) + 1):
        low, high = weight[:, group == each].amin(1).clamp(max=0), weight[:, group == each].amax(1).clamp(min=0)
        scales.append(((high - low) / top).half().clamp(min=1e-4))
        zeros.append((-low / scales[-1].float()).round().clamp(0, top))
    scale, zero = torch.stack(scales), torch.stack(zeros)
    codes = (weight / scale.float()[group].T + zero[group].T).round().clamp(0, top)
    return codes.int(), scale, zero.int(), (codes - zero[group].T) * scale.float()[group].T


def gptq(weight: Tensor, bits: int, *, reordered: bool = False, plus: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Zeros less ``plus`` as GPTQModel stores them: of whole words, in which a zero of 0 borrows from the next."""
    weight = weight.clone()
    weight[1] = weight[1].abs()  # its zeros are 0
    group = torch.arange(weight.shape[1]) // GROUP
    if reordered:
        group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(0))]
    codes, scale, zero, numbers = with_zeros(weight, bits, group)
    parts = {"qweight": words(codes.tolist(), bits).T, "scales": scale, "g_idx": group.int()}
    ones = words([[plus] * (32 // bits)], bits)
    parts["qzeros"] = words(zero.tolist(), bits) - ones
    return parts, numbers


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale, zero, numbers = with_zeros(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    order = [8 * word + index for word in range(len(weight) // 8) for index in (0, 2, 4, 6, 1, 3, 5, 7)]
    parts = {"qweight": words(codes.T[:, order].tolist(), 4), "qzeros": words(zero[:, order].tolist(), 4)}
    return parts | {"scales": scale}, numbers


def nf4(weight: Tensor, *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize in blocks of 64 with any table: half a byte is an index in it."""
    table = torch.linspace(-1, 1, 16) ** 3
    blocks = weight.flatten().view(-1, 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts, factors = {}, blocks.abs().amax(1)
    absmax = factors
    if nested:
        wide, offset = torch.linspace(-1, 1, 256), float(factors.mean())
        by_256 = torch.nn.functional.pad(factors - offset, (0, -len(factors) % 256)).view(-1, 256)
        largest = by_256.abs().amax(1)
        absmax = ((by_256 / largest[:, None])[..., None] - wide).abs().argmin(-1)
        factors = (wide[absmax] * largest[:, None]).flatten()[: len(factors)] + offset
        absmax = absmax.flatten()[: len(factors)].to(torch.uint8)
        parts = {"weight.nested_absmax": largest, "weight.nested_quant_map": wide}
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    codes = ((blocks / factors[:, None])[..., None] - table).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    parts |= {"weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8), "weight.absmax": absmax}
    message = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts |= {"weight.quant_map": table, "weight.quant_state.bitsandbytes__nf4": message}
    return parts, (table[codes] * factors[:, None]).view_as(weight)


def int8_by_row(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round()
    parts = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes * (largest / 127)[:, None]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
BITSANDBYTES = {"quant_method": "bitsandbytes"}
KNOWN: dict[str, tuple[dict, Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]]] = {
    "GPTQ int4": (GPTQ, lambda weight: gptq(weight, 4)),
    "GPTQ int2": ({**GPTQ, "bits": 2}, lambda weight: gptq(weight, 2)),
    "GPTQ int8": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, 8, reordered=True, plus=0)),
    "AWQ int4": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "nf4": (BITSANDBYTES, lambda weight: nf4(weight, nested=False)),
    "nf4 nested": (BITSANDBYTES, lambda weight: nf4(weight, nested=True)),
    "int8": (BITSANDBYTES, int8_by_row),
}
"""Formats by name: the config's ``quantization_config``, and the parts of a matrix with their values."""

FORMATS: dict[str, tuple[dict, Callable[[Tensor], dict[str, Tensor]]]] = {
    "int4": (
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
        lambda weight: int_packed(weight, 4, GROUP),
    ),
    "int8": (
        _compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        lambda weight: int_packed(weight, 8, weight.shape[1]),
    ),
    "fp8": (_compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), fp8_by_row),
    "int8 plain": (
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
        int8_of_one_scale,
    ),
    "FP8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"},
        fp8_by_block,
    ),
}
"""Formats by name: the config's ``quantization_config``, and the parts of a matrix by their endings."""


def make_quantized(folder: Path, family: str, kind: str) -> Path:
    """A tiny checkpoint in bfloat16 whose projections are quantized: not embeddings, norms, router and output."""
    message, quantize = FORMATS[kind]
    _replace_projections(folder, family, message, lambda name, weight: quantize(weight))
    return folder


def make_known(folder: Path, family: str, kind: str) -> dict[str, Tensor]:
    """Make a checkpoint in a format of `KNOWN`; return the values of its quantized matrices by name, in float32."""
    message, quantize = KNOWN[kind]
    reference = {}

    def parts(name: str, weight: Tensor) -> dict[str, Tensor]:
        stored, reference[name] = quantize(weight)
        return stored

    _replace_projections(folder, family, message, parts)
    return reference


def _replace_projections(
    folder: Path, family: str, message: dict, parts: Callable[[str, Tensor], dict[str, Tensor]]
) -> None:
    make_checkpoint(folder, family, torch.bfloat16)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"):
            module = name.removesuffix("weight")
            tensors |= {module + part: value.contiguous() for part, value in parts(name, tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=message)
