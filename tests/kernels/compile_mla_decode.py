"""Launches of `mla_decode` at a context of 128k tokens, for `kernel_checks.compiled`."""

from dataclasses import replace
from itertools import chain

import torch
from compilation import SHARED_LIMITS

from surgery.kernels.launch import Launch
from surgery.kernels.mla_decode import packed_kernel
from surgery.kernels.mla_decode.kernel import default_config, launches
from surgery.kernels.unpack_rows import kernel as unpack_kernel
from surgery.model.token_format import TokenFormat

SHAPES = ((32, 512, 64), (32, 256, 64), (32, 128, 64), (28, 448, 64), (128, 512, 64), (40, 320, 32), (8, 48, 16))
"""Heads, r, ρ: Llama-2-7B and Llama-3-8B at three ratios, Qwen2.5-7B, DeepSeek-V3, ranks that are no powers of two."""


def launch(heads, rank, rope, *, sm, page=0, gains=0, tokens=1, splits=32, dtype=torch.bfloat16) -> Launch:
    """The attention itself, on meta tensors; its merge is `split_kv`'s and checked there."""
    batch, capacity = 4, 131_072
    with torch.device("meta"):
        rows = (4096, page) if page else (batch, capacity)
        needs = {"paged": page > 0, "gains": gains > 0}
        config = default_config(tokens * heads, rank, rope, dtype, SHARED_LIMITS[sm], **needs)
        return launches(
            torch.empty(batch, tokens, heads, rank + rope, dtype=dtype),
            torch.empty(*rows, rank, dtype=dtype),
            torch.empty(*rows, rope, dtype=dtype),
            0.1,
            torch.empty(batch, dtype=torch.int32),
            torch.empty(batch, dtype=torch.int32),
            torch.empty(batch, capacity // page, dtype=torch.int32) if page else None,
            torch.empty(*rows, gains, dtype=dtype) if gains else None,
            out=torch.empty(batch, tokens, heads, rank, dtype=dtype),
            lse=torch.empty(batch, tokens, heads),
            config=replace(config, splits=splits),
        )[0]


def cases(sm: int) -> dict[str, Launch]:
    """Return the cases by name, with the default configuration for such a GPU."""
    results = {f"{heads} x {rank}+{rope}": launch(heads, rank, rope, sm=sm) for heads, rank, rope in SHAPES}
    results |= {
        f"{heads} x {rank}+{rope} paged": launch(heads, rank, rope, sm=sm, page=64) for heads, rank, rope in SHAPES[:4]
    }
    results["32 x 512+0, one split"] = launch(32, 512, 0, sm=sm, splits=1)
    results["32 x 256+64, 8 gains"] = launch(32, 256, 64, sm=sm, gains=8)
    results["32 x 256+64, 4 tokens"] = launch(32, 256, 64, sm=sm, tokens=4)
    results["32 x 512+64, fp32"] = launch(32, 512, 64, sm=sm, dtype=torch.float32)
    return results


PACKED = {
    "512+128 in 320 B": ([("4+4", 256)], [("4+4", 64)]),
    "196+192 in 192 B": (
        [("8", 16), ("5+3", 32), ("4+4", 24), ("3+3+2", 12), ("2+2+2+2", 8)],
        [("8", 24), ("5+3", 40), ("4+4", 28), ("2+2+2+2", 8)],
    ),
}
"""Runs of the latent and of the shared key."""


def unpacked(name: str, with_keys: bool = False) -> Launch:
    """Return the launch that unpacks rows for `mla_decode_packed` of one new token, on meta tensors.

    With `with_keys`, values include the keys before their rotation.
    """
    batch, capacity, heads, dtype = 4, 131_071, 32, torch.bfloat16
    latent_runs, rope_runs = PACKED[name]
    latent, whole = TokenFormat(tuple(latent_runs)), TokenFormat((*latent_runs, *rope_runs))
    fields, rank, width = tuple(chain.from_iterable(whole.fields())), latent.channels, whole.channels
    values = width if with_keys else rank
    with torch.device("meta"):
        counts = torch.empty(batch, dtype=torch.int32)
        return packed_kernel.launches(
            torch.empty(batch, 1, heads, values + width - rank, dtype=dtype),
            torch.empty(batch, capacity, whole.row_bytes // 2, dtype=torch.int16),
            torch.empty(width),
            torch.empty(width),
            0.1,
            fields,
            rank,
            *(torch.empty(2, count, (width - rank) // 2) for count in (128, capacity // 128 + 1)),
            torch.empty(batch, 4, width, dtype=dtype),
            counts,
            counts,
            counts,
            out=torch.empty(batch, 1, heads, values, dtype=dtype),
            lse=torch.empty(batch, 1, heads),
        )[0]


def packed_cases() -> dict[str, Launch]:
    """Return the launches that unpack rows of one pattern and of five, and of one with keys as values."""
    results = {name: unpacked(name) for name in PACKED}
    return results | {f"{name}, keys as values": unpacked(name, with_keys=True) for name in list(PACKED)[:1]}


BLOCK_SIZES = (16, 32, 64, 128)
"""Tokens of vLLM's blocks."""


def in_blocks(page: int, *, sm: int, gains: int = 0, unpacked: bool = False) -> Launch:
    """Return the launch of `mla_decode` of 256 requests over vLLM's blocks, as its plugin sees them.

    A token's latent, rotated key and gains lie side by side; unpacked tokens are after the rows of 32 layers.
    """
    batch, heads, rank, rope, dtype = 256, 32, 512, 128 if unpacked else 64, torch.bfloat16
    with torch.device("meta"):
        vectors = torch.empty(4096, page, rank + rope + gains, dtype=dtype)
        if unpacked:
            vectors = vectors.as_strided(vectors.shape, (page * (16 * 320 + rank + rope), rank + rope, 1))
        needs = {"paged": True, "gains": gains > 0}
        return launches(
            torch.empty(batch, 1, heads, rank + rope, dtype=dtype),
            vectors[..., :rank],
            vectors[..., rank : rank + rope],
            0.1,
            torch.empty(batch, dtype=torch.int32),
            None,
            torch.empty(batch, 131_072 // page, dtype=torch.int32),
            vectors[..., rank + rope :] if gains else None,
            out=torch.empty(batch, 1, heads, rank, dtype=dtype),
            lse=torch.empty(batch, 1, heads),
            config=default_config(heads, rank, rope, dtype, SHARED_LIMITS[sm], **needs),
        )[0]


def block_cases(sm: int) -> dict[str, Launch]:
    """Return the launches that read vLLM's blocks of every size."""
    results = {f"blocks of {page}": in_blocks(page, sm=sm) for page in BLOCK_SIZES}
    results["blocks of 64, 8 gains"] = in_blocks(64, sm=sm, gains=8)
    results["blocks of 64, unpacked"] = in_blocks(64, sm=sm, unpacked=True)
    return results


def unpacked_in_blocks(page: int, gains: int, with_keys: bool = False) -> Launch:
    """Return the launch that unpacks rows of one of 32 layers to memory at the ends of vLLM's blocks."""
    batch, layers = 256, 32
    latent_runs, rope_runs = PACKED["512+128 in 320 B"]
    rank, whole = TokenFormat(tuple(latent_runs)).channels, TokenFormat((*latent_runs, *rope_runs))
    width, row = whole.channels, whole.row_bytes // 2 + gains
    values = width if with_keys else rank
    size = values + width - rank
    with torch.device("meta"):
        block = page * (layers * row + size)
        rows = torch.empty(4096, page, row, dtype=torch.int16).as_strided((4096, page, row), (block, row, 1))
        memory = torch.empty(4096, page, size, dtype=torch.bfloat16)
        memory = memory.as_strided((4096, page, size), (block, size, 1))
        return unpack_kernel.launches(
            rows,
            torch.empty(width),
            torch.empty(width),
            memory[..., :values],
            memory[..., values:],
            tuple(chain.from_iterable(whole.fields())),
            torch.empty(batch, dtype=torch.int32),
            torch.empty(batch, 131_072 // page, dtype=torch.int32),
            *(torch.empty(2, count, (width - rank) // 2) for count in (128, 1024)),
            torch.empty(batch, 4, width, dtype=torch.bfloat16),
        )[0]


def unpacked_block_cases() -> dict[str, Launch]:
    """Return the launches that unpack rows in vLLM's blocks of every size, and with gains."""
    results = {f"blocks of {page}": unpacked_in_blocks(page, 0) for page in BLOCK_SIZES}
    results["blocks of 64, 8 gains"] = unpacked_in_blocks(64, 8)
    return results | {"blocks of 64, keys as values": unpacked_in_blocks(64, 0, with_keys=True)}


def first_launches() -> dict[str, Launch]:
    """The one shape that each default run looks at."""
    return {"32 x 512+64": launch(32, 512, 64, sm=80)}
