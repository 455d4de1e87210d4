"""Keys and values through vLLM's own cache formats, run by the interpreter of its environment.

    python run_vllm_formats.py REQUEST ANSWER

The request names a file of tensors (``tensors``: keys and values [T, H, d], float32) and where the answer's go
(``out``); the answer names the formats. vLLM's build for CPUs brings no Triton backend, so its kernels run in Triton's
interpreter. By format: keys and values as attention reads them, [T, H, d].
"""

import json
import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import vllm.triton_utils as triton_utils

triton_utils.triton, triton_utils.tl, triton_utils.HAS_TRITON = triton, tl, True

BLOCK = 16
PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")


def main(request_path: str, answer_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    tensors = torch.load(request["tensors"])
    keys, values = tensors["keys"], tensors["values"]
    read = {"int4_per_token_head": int4(keys, values), "nvfp4": tuple(map(nvfp4, (keys, values)))}
    for dtype in (torch.int8, torch.float8_e4m3fn):
        name = "int8" if dtype == torch.int8 else "fp8"
        read[f"{name}_per_token_head"] = per_token_head(keys, values, dtype)
    for preset in PRESETS:
        read[preset] = turboquant(preset, keys, values)
    torch.save(read, request["out"])
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(list(read), file)


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def int4(keys, values):
    from vllm.v1.attention.ops import int4_per_token_head as op

    tokens, heads, width = keys.shape
    caches = [torch.zeros(blocks(tokens), BLOCK, heads, width // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks(tokens), BLOCK, heads) for _ in range(2)]
    op.reshape_and_cache_int4(
        keys, values, *caches, torch.arange(tokens), k_scale_cache=scales[0], v_scale_cache=scales[1]
    )
    read = []
    for cache, scale in zip(caches, scales, strict=True):
        # The low bits of the scale are the zero point; attention rotates queries and its output instead of these.
        bits = scale.flatten(0, 1)[:tokens, :, None].view(torch.int32)
        packed = cache.flatten(0, 1)[:tokens]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).float()
        turned = (codes - (bits & 15)) * (bits & -16).view(torch.float32)
        read.append(op.single_rht(turned, inverse=True) / width)
    return tuple(read)


def per_token_head(keys, values, dtype):
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_per_token_head_quant as store,
    )
    from vllm.v1.kv_cache_interface import KVQuantMode

    tokens, heads, width = keys.shape
    caches = [torch.zeros(blocks(tokens), BLOCK, heads, width, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(blocks(tokens), BLOCK, heads) for _ in range(2)]
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD if dtype == torch.int8 else KVQuantMode.FP8_PER_TOKEN_HEAD
    store(keys, values, *caches, *scales, torch.arange(tokens), mode)
    pairs = zip(caches, scales, strict=True)
    return tuple((cache.float() * scale[..., None]).flatten(0, 1)[:tokens] for cache, scale in pairs)


def nvfp4(tensor):
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

    return ref_nvfp4_quant_dequant(tensor.flatten(0, 1), torch.tensor(1.0), 16).view(tensor.shape)


def turboquant(preset, keys, values):
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.ops import triton_turboquant_decode as decode
    from vllm.v1.attention.ops import triton_turboquant_store as store

    decode._use_fp8_e4b15 = store._use_fp8_e4b15 = lambda *_: 0  # asks for a GPU
    tokens, heads, width = keys.shape
    config = TurboQuantConfig.from_cache_dtype(preset, width)
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix /= math.sqrt(width)
    centroids = get_centroids(width, config.centroid_bits)
    cache = torch.zeros(blocks(tokens), BLOCK, heads, config.slot_size_aligned, dtype=torch.uint8)
    store.triton_turboquant_store(
        keys,
        values,
        cache,
        torch.arange(tokens, dtype=torch.int32),
        matrix,
        (centroids[1:] + centroids[:-1]) / 2,
        config.mse_bits,
        config.key_packed_size,
        config.value_quant_bits,
        config.key_fp8,
    )
    read = [torch.zeros(1, heads, tokens, width, dtype=torch.float16) for _ in range(2)]
    data = math.ceil(width * config.value_quant_bits / 8)
    decode._tq_full_dequant_kv[(tokens, heads)](
        cache,
        torch.arange(blocks(tokens), dtype=torch.int32)[None],
        centroids,
        *read,
        *read[0].stride()[:3],
        *read[1].stride()[:3],
        *cache.stride()[:3],
        blocks(tokens),
        HEAD_DIM=width,
        BLOCK_SIZE=BLOCK,
        NUM_KV_HEADS=heads,
        MSE_BYTES=math.ceil(width * config.mse_bits / 8),
        KPS=config.key_packed_size,
        VQB=config.value_quant_bits,
        VAL_DATA_BYTES=data,
        MSE_BITS=config.mse_bits,
        KEY_FP8=int(config.key_fp8),
        BLOCK_D=triton.next_power_of_2(width),
        NORM_CORRECTION=int(config.norm_correction),
    )
    results = [each[0].transpose(0, 1).float() for each in read]
    if not config.key_fp8:
        results[0] = results[0] @ matrix
    return tuple(results)


if __name__ == "__main__":
    main(*sys.argv[1:])
