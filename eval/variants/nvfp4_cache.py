"""NVFP4 (`--kv-cache-dtype nvfp4` of vLLM, SGLang and TensorRT-LLM): e2m1 values, a scale in e4m3 for 16 of them.

As in vLLM 0.32, `quantization/utils/nvfp4_emulation_utils.py`, with a global scale of 1, which vLLM takes where a
checkpoint has no KV scales; `tests/engines/test_vllm_formats.py` compares. 4.5 bits a value.

SGLang's and TensorRT-LLM's were not tried. Left out: engines multiply queries in fp8, and calibrated global scales,
which only move the range of the e4m3 scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.eval.variants.coded_cache import Coder, Parts, packed, unpacked
from surgery.eval.variants.vllm_cache import as_fp8, of_fp8

BLOCK = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Nvfp4(Coder):
    """Blocks of 16 channels; d / 2 + d / 16 bytes a token and head."""

    def encode(self, tokens: Tensor) -> Parts:
        if tokens.shape[-1] % BLOCK:
            raise ValueError(f"heads of {tokens.shape[-1]} channels: NVFP4 has blocks of {BLOCK}")
        blocks = tokens.float().unflatten(-1, (-1, BLOCK))
        scale = as_fp8(blocks.abs().amax(-1, keepdim=True) * (1 / 6))
        factor = of_fp8(scale)
        scaled = (blocks * torch.where(factor == 0, 0.0, 1 / factor)).clamp(-6, 6)
        middles = torch.tensor(MIDDLES, device=tokens.device)
        size = scaled.abs().contiguous()
        # Halves go to the level of an even code: above a middle with an odd one below it, and below the others.
        down, up = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
        codes = torch.where(down % 2 == 0, down, up)
        return packed((codes + 8 * (scaled < 0)).flatten(-2), 4), scale.squeeze(-1)

    def decode(self, parts: Parts) -> Tensor:
        codes = unpacked(parts[0], 4).long().unflatten(-1, (-1, BLOCK))
        values = torch.tensor(LEVELS, device=codes.device)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return (values * of_fp8(parts[1]).unsqueeze(-1)).flatten(-2)
