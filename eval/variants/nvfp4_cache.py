"""NVFP4 KV cache (`--kv-cache-dtype nvfp4` of vLLM, SGLang and TensorRT-LLM): e2m1 values, one e4m3 scale per 16.

As in vLLM 0.32, `quantization/utils/nvfp4_emulation_utils.py`, with a global scale of 1, vLLM's default for
checkpoints without KV scales; `tests/engines/test_vllm_formats.py` compares. 4.5 bits per element.

SGLang and TensorRT-LLM were not compared. Not emulated: fp8 queries, and calibrated global scales, which only shift
the range of the e4m3 scales.
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
    """Quantization of blocks of 16 channels; d / 2 + d / 16 bytes per token and head."""

    def encode(self, tokens: Tensor) -> Parts:
        if tokens.shape[-1] % BLOCK:
            raise ValueError(f"head size {tokens.shape[-1]} is not supported; NVFP4 needs multiples of {BLOCK}")
        blocks = tokens.float().unflatten(-1, (-1, BLOCK))
        scale = as_fp8(blocks.abs().amax(-1, keepdim=True) * (1 / 6))
        factor = of_fp8(scale)
        scaled = (blocks * torch.where(factor == 0, 0.0, 1 / factor)).clamp(-6, 6)
        middles = torch.tensor(MIDDLES, device=tokens.device)
        size = scaled.abs().contiguous()
        # Ties round to the level with the even code.
        down, up = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
        codes = torch.where(down % 2 == 0, down, up)
        return packed((codes + 8 * (scaled < 0)).flatten(-2), 4), scale.squeeze(-1)

    def decode(self, parts: Parts) -> Tensor:
        codes = unpacked(parts[0], 4).long().unflatten(-1, (-1, BLOCK))
        values = torch.tensor(LEVELS, device=codes.device)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return (values * of_fp8(parts[1]).unsqueeze(-1)).flatten(-2)
