"""Reimplementation of KVarN (`--kv-cache-dtype kvarn_k4v2_g128`, vLLM #46812).

Muller et al., "KVarN: Variance-Normalized KV-Cache Quantization Mitigates Error Accumulation in Reasoning Tasks",
arXiv:2606.03458. Tiles of `group` tokens of a head are rotated by a Hadamard matrix. Rows and columns are divided by
their standard deviations in turn, and the scales of the iteration with the lowest imbalance are kept. Each row (a
channel of the keys, a token of the values) is then quantized uniformly between its minimum and maximum. Scales and
zero points are fp16, as in huawei-csl/KVarN and `vllm/model_executor/layers/quantization/kvarn`. The first 128 tokens
and the last, incomplete tile stay in full precision.

No known differences; the original kernels were not run for comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from surgery.eval.variants.coded_cache import CodedLayer, Coder, Parts, packed, rotated, unpacked

PRESETS = {"kvarn_k4v4_g128": (4, 4, 128), "kvarn_k4v2_g128": (4, 2, 128), "kvarn_k4v2_g64": (4, 2, 64)}
"""Bits of keys, bits of values, tokens per tile."""

SINKS = 128
ITERATIONS = 8
DEVIATIONS = (1e-3, 1e3)
LOG_SCALES = (-0.3, 10.0)


class KVarNTiles(Coder):
    """Variance-normalized tiles, quantized by row: a row is a channel of the keys or a token of the values."""

    def __init__(self, bits: int, tile: int, *, values: bool) -> None:
        self.bits, self.tile, self.values = bits, tile, values

    def encode(self, tokens: Tensor) -> Parts:
        tiles = rotated(tokens, tokens.shape[-1]).unflatten(2, (-1, self.tile))
        tiles = tiles if self.values else tiles.transpose(-1, -2)
        rows, columns = balance(tiles)
        balanced = tiles / columns / rows
        least, max_code = balanced.amin(-1, keepdim=True), 2**self.bits - 1
        scale = ((balanced.amax(-1, keepdim=True) - least) / max_code).clamp(min=1e-10)
        codes = ((balanced - least) / scale).round().clamp(0, max_code)
        return packed(codes, self.bits), (rows * scale).half(), (rows * least).half(), columns.half()

    def decode(self, parts: Parts) -> Tensor:
        codes, (scale, zero, columns) = unpacked(parts[0], self.bits), (part.float() for part in parts[1:])
        tiles = (codes * scale + zero) * columns
        tokens = (tiles if self.values else tiles.transpose(-1, -2)).flatten(2, 3)
        return rotated(tokens, tokens.shape[-1])


def balance(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scales of the rows [..., R, 1] and the columns [..., 1, C] of tiles [..., R, C], float32."""
    log_columns, log_rows = torch.zeros_like(tiles[..., :1, :]), torch.zeros_like(tiles[..., :1])
    current = tiles
    best, columns, rows = _imbalance(tiles), log_columns.exp(), log_rows.exp()
    for _ in range(ITERATIONS):
        deviation = current.std(-2, keepdim=True).clamp(*DEVIATIONS)
        log_columns = (log_columns + deviation.log()).clamp(*LOG_SCALES)
        current = tiles / log_columns.exp() / log_rows.exp()
        deviation = current.std(-1, keepdim=True).clamp(*DEVIATIONS)
        log_rows = (log_rows + deviation.log()).clamp(*LOG_SCALES)
        current = tiles / log_columns.exp() / log_rows.exp()
        better = (imbalance := _imbalance(current)) <= best
        columns, rows = torch.where(better, log_columns.exp(), columns), torch.where(better, log_rows.exp(), rows)
        best = torch.where(better, imbalance, best)
    return rows, columns


def _imbalance(tiles: Tensor) -> Tensor:
    """Sum the ratios of largest to smallest standard deviation over columns and over rows: [..., 1, 1]."""
    spread = [tiles.std(dim, keepdim=True) for dim in (-2, -1)]
    return sum(each.amax((-2, -1), keepdim=True) / each.amin((-2, -1), keepdim=True).clamp(min=1e-8) for each in spread)


def kvarn_layers(preset: str, config: PreTrainedConfig) -> list[CodedLayer]:
    """Return the cache layers of one of the `PRESETS`."""
    key_bits, value_bits, tile = PRESETS[preset]
    keys, values = KVarNTiles(key_bits, tile, values=False), KVarNTiles(value_bits, tile, values=True)
    return [CodedLayer(keys, values, sinks=SINKS) for _ in range(config.num_hidden_layers)]
