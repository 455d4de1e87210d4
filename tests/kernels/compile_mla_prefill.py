"""Launches of prefill attention at sizes of real models, for `kernel_checks.compiled`."""

import torch

from surgery.kernels.launch import Launch
from surgery.kernels.mla_prefill.backward_kernel import backward_launches, default_configs
from surgery.kernels.mla_prefill.kernel import default_config
from surgery.kernels.mla_prefill.kernel import launches as forward_launches

TOKENS = 131_072

SHAPES = {
    "mla 32 x 192/128": (32, 32, 192, 128),
    "mla 28 x 96/64": (28, 28, 96, 64),
    "gqa 32/8 x 128": (32, 8, 128, 128),
}
"""H, K and the widths of keys and values."""


def of_shape(heads, kv_heads, key_width, value_width, *, capability, dtype=torch.bfloat16, masks=False):
    """Launches of a forward and a backward pass, named, with the configuration of a GPU."""
    settings = {}
    tokens = TOKENS // 8 if masks else TOKENS
    with torch.device("meta"):
        # As projections leave them: tokens before heads.
        query = torch.empty(2, tokens, heads, key_width, dtype=dtype).transpose(1, 2)
        key = torch.empty(2, TOKENS, kv_heads, key_width, dtype=dtype).transpose(1, 2)
        value = torch.empty(2, TOKENS, kv_heads, value_width, dtype=dtype).transpose(1, 2)
        out = torch.empty(2, tokens, heads, value_width, dtype=dtype)
        lse = torch.empty(2, heads, tokens)
        if masks:
            rows = torch.empty(2, dtype=torch.int32)
            bounds = torch.empty(2, 2, TOKENS, dtype=torch.int32)
            settings = {"starts": rows, "lengths": rows, "bounds": bounds, "window": 4096}
        config = default_config(dtype.itemsize, capability)
        results = {"forward": forward_launches(query, key, value, 0.1, **settings, out=out, lse=lse, config=config)[0]}
        configs = default_configs(dtype.itemsize, capability)
        reference = {"out": out, "lse": lse, "grad_out": out, "grad_lse": None, "delta": lse}
        gradients = (query, key, value)
        backward = backward_launches(*gradients, 0.1, **settings, **reference, gradients=gradients, configs=configs)
        results |= dict(zip(("delta", "keys", "queries"), backward, strict=True))
    return results


def launches_of(capability: int) -> dict[str, Launch]:
    """Both passes for every shape; for one of them with everything that hides tokens, and in fp32."""
    results = {}
    for name, shape in SHAPES.items():
        results |= {f"{name}, {part}": one for part, one in of_shape(*shape, capability=capability).items()}
    widest = SHAPES["mla 32 x 192/128"]
    for name, setting in {"masks": {"masks": True}, "fp32": {"dtype": torch.float32}}.items():
        results |= {f"{name}, {part}": one for part, one in of_shape(*widest, capability=capability, **setting).items()}
    return results
