"""Number formats in which parts of a stock MLA checkpoint underflow or overflow, detected from its tensors.

The down-projection rows of a latent may be much smaller than the rotary rows of the same tensor, and underflow in a
low-precision format or in a quantizer's block scale. Earlier versions scaled them by 2^-30.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader
from surgery.engines.facts import MLA

LARGEST_ERROR = 0.25
"""Relative error of the latents' weights above which a format ruins them; Q4_0 and fp8 cause less than a tenth."""
FP8_MAX = 448.0


def _by_blocks(size: int, divisor: float) -> Callable[[Tensor], Tensor]:
    """Return a function that applies only the rounding error of float16 block scales to weights."""

    def rounded(weight: Tensor) -> Tensor:
        blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
        scale = blocks.abs().amax(-1, keepdim=True) / divisor
        ratio = torch.where(scale > 0, scale.half().double() / scale, 1.0)
        return (blocks * ratio).flatten(1)[:, : weight.shape[1]]

    return rounded


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().max().clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
    return (weight / scale).to(torch.float8_e4m3fn).double() * scale


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "float16": lambda weight: weight.half().double(),
    "Q8_0": _by_blocks(32, 127),
    "Q4_0": _by_blocks(32, 8),
    "Q4_K": _by_blocks(256, 15 * 63 / 2),
    "fp8 weights with one scale": _fp8,
}
"""Rounding of a float64 weight [n, m] by format."""
FP8_CACHE = "an fp8 KV cache"


def ruinous_formats(reader: CheckpointReader) -> list[str]:
    """List the formats in which a stock MLA checkpoint produces garbage; empty for other models and quantized weights.

    Reads the latent projections with their norms and biases.
    """
    config = reader.config
    if config.get("model_type") != MLA or reader.dequantised_from is not None:
        return []
    ruined: dict[str, None] = {}
    for layer in range(config["num_hidden_layers"]):
        prefix, width = f"model.layers.{layer}.self_attn.", config["kv_lora_rank"]
        ruined |= dict.fromkeys(_ruins(reader, prefix + "kv_a_proj_with_mqa", width, prefix + "kv_a_layernorm.weight"))
        if prefix + "q_a_proj.weight" in reader:
            rows = reader.info(prefix + "q_a_proj.weight").shape[0]
            of_queries = _ruins(reader, prefix + "q_a_proj", rows, prefix + "q_a_layernorm.weight")
            ruined |= dict.fromkeys(name for name in of_queries if name != FP8_CACHE)  # queries are not cached
    return [name for name in (*FORMATS, FP8_CACHE) if name in ruined]


def _ruins(reader: CheckpointReader, module: str, width: int, norm: str) -> list[str]:
    """List the formats that ruin the first ``width`` rows of a projection, its bias or the following norm."""
    weight, norm = reader.tensor(module + ".weight").double(), reader.tensor(norm).double()
    bias = reader.tensor(module + ".bias").double() if module + ".bias" in reader else weight.new_zeros(len(weight))
    formats = []
    for name, rounded in FORMATS.items():
        error = (rounded(weight) - weight)[:width].norm()
        overflows = name == "float16" and not bool(torch.cat([norm, bias]).half().isfinite().all())
        if overflows or not error <= LARGEST_ERROR * weight[:width].norm():
            formats.append(name)
    # If one channel dominates, RMSNorm outputs √width times its weight.
    largest = int(bias[:width].abs().argmax())
    if bias[largest].abs() > FP8_MAX and norm[largest].abs() * width**0.5 > FP8_MAX:
        formats.append(FP8_CACHE)
    return formats
