"""Transform coding of vectors after KVTC: principal components, bits by dynamic programming, and DEFLATE.

Staniszewski and Łańcucki, "KV Cache Transform Coding for Compact Storage in LLM Inference", ICLR 2026,
arXiv:2511.01815, sections 3.1 to 3.3; `allocate` gives the optimum of the pseudocode in its appendix B.17. No code of
the authors was available, only kernels in NVIDIA's Dynamo (`lib/kvbm-kernels`; read, not run), which project and
quantize but neither calibrate nor allocate. Where the paper leaves a choice open, the choice here is ours:

- 2 and 4 bits: even steps from the minimum of a group to its maximum, as in KIVI and in Dynamo. FP8: e4m3 of the group
  shifted to the middle of its range and scaled to ±448; Dynamo casts without a scale, the paper gives every group one.
  Shift and scale are fp16 and belong to one token.
- The bytes are ordered by group, as in Dynamo: shifts, scales and values of all tokens. zlib's default level takes the
  place of nvCOMP.
- The projection is in float32, from the covariance; the authors store it in 16 bits, from a randomized SVD.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from surgery.eval.variants.coded_cache import packed

SIZES = (1, 16, 64, 256, 1024)
"""Components in a group."""

BITS = (2, 4, 8)
"""Bits of a component: even steps, or e4m3 for 8."""

OVERHEAD = 32
"""Bits of a group's shift and scale."""

FP8_MAX = 448.0
ELEMENTS = 1 << 17
"""Elements that are quantized at once in `window_errors`, few enough for a CPU's cache."""


@dataclass(frozen=True)
class Group:
    """Adjacent principal components that share shift and scale: `size` of them from `start` on, with `bits` each."""

    start: int
    size: int
    bits: int


@dataclass(frozen=True)
class Spectrum:
    """Principal components of calibration vectors, and the errors of all groups that they can be cut into.

    Attributes:
        mean: [p].
        basis: [p, r], orthonormal columns by decreasing variance.
        errors: squared error of a group, by (size, bits): [r - size + 1], by its first component.
        energies: squared error of a dropped component [r].
    """

    mean: Tensor
    basis: Tensor
    errors: dict[tuple[int, int], Tensor]
    energies: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, sample: Tensor) -> Spectrum:
        """Compute the spectrum of a mean [p] and covariance [p, p]; errors are those of the vectors `sample` [n, p]."""
        basis = torch.linalg.eigh(covariance.float()).eigenvectors.flip(-1)
        mean = mean.float()
        components = (sample.float() - mean) @ basis
        sizes = [size for size in SIZES if size <= components.shape[-1]]
        errors = {(size, bits): window_errors(components, size, bits) for size in sizes for bits in BITS}
        return cls(mean, basis, errors, components.double().square().sum(0))

    def allocate(self, budget: int) -> list[Group]:
        """Return the groups with the least error among those that take at most `budget` bits a vector."""
        return allocate(self.errors, self.energies, budget)


class TransformCoder(nn.Module):
    """Coder of vectors [..., p] with a fixed projection and groups. A module, which the count of cache bytes skips.

    Attributes:
        groups: coded groups; components outside of all groups are zero.
    """

    def __init__(self, spectrum: Spectrum, groups: Sequence[Group]) -> None:
        """Project on the components up to the last of `groups`."""
        super().__init__()
        self.groups = groups
        rank = max((group.start + group.size for group in self.groups), default=0)
        self.register_buffer("mean", spectrum.mean)
        self.register_buffer("basis", spectrum.basis[:, :rank].contiguous())
        self._runs = _runs(self.groups)

    def encode(self, vectors: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Encode vectors [..., n, p] to shifts and scales [..., n, k] and codes [..., n, k, size] of k groups a run."""
        components, parts = (vectors.float() - self.mean) @ self.basis, []
        for start, count, size, bits in self._runs:
            values = components[..., start : start + count * size].unflatten(-1, (count, size))
            shift, scale = frame(values.amin(-1), values.amax(-1), bits)
            codes = quantize(values, shift.unsqueeze(-1), scale.unsqueeze(-1), bits)
            codes = codes.to(torch.float8_e4m3fn).view(torch.uint8) if bits == 8 else codes.to(torch.uint8)
            parts.append((shift, scale, codes))
        return parts

    def decode(self, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Decode to vectors [..., n, p], float32."""
        if not parts:
            return self.mean
        components = parts[0][0].new_zeros((*parts[0][0].shape[:-1], self.basis.shape[1]), dtype=torch.float32)
        for (start, count, size, bits), (shift, scale, codes) in zip(self._runs, parts, strict=True):
            codes = codes.view(torch.float8_e4m3fn) if bits == 8 else codes
            values = dequantize(codes.float(), shift.unsqueeze(-1), scale.unsqueeze(-1))
            components[..., start : start + count * size] = values.flatten(-2)
        return components @ self.basis.T + self.mean

    def serialize(self, parts: list[tuple[Tensor, Tensor, Tensor]]) -> bytes:
        """Pack the parts of n vectors [n, ...] into bytes, group by group; n is a multiple of 4."""
        stream = []
        for (_, count, _, bits), (shift, scale, codes) in zip(self._runs, parts, strict=True):
            flat = codes.transpose(0, 1).flatten(1)  # [k, n·size]
            stored = flat if bits == 8 else packed(flat, bits)
            for group in range(count):
                stream += [shift[:, group], scale[:, group], stored[group]]
        return b"".join(part.contiguous().cpu().numpy().tobytes() for part in stream)


def deflated(stream: bytes) -> int:
    """Return the bytes that DEFLATE leaves of a stream."""
    return len(zlib.compress(stream))


def frame(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return fp16 shift and scale of groups from their extremes."""
    if bits == 8:
        return ((low + high) / 2).half(), ((high - low) / (2 * FP8_MAX)).half()
    return low.half(), ((high - low) / (2**bits - 1)).half()


def quantize(values: Tensor, shift: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Quantize values to codes, as float32: whole numbers below 2^bits, or values of e4m3."""
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    codes = (values - shift.float()).mul_(inverse)
    if bits == 8:
        return codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return codes.round_().clamp_(0, 2**bits - 1)


def dequantize(codes: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return the values of codes."""
    return codes * scale.float() + shift.float()


def window_errors(components: Tensor, size: int, bits: int) -> Tensor:
    """Compute the squared errors [r - size + 1] of all windows of `size` components [n, r] as groups, summed over n."""
    low = high = components
    reach = 1
    while reach < size:  # extremes of a window from those of its halves; sizes are powers of two
        low = torch.minimum(low[:, :-reach], low[:, reach:])
        high = torch.maximum(high[:, :-reach], high[:, reach:])
        reach *= 2
    shift, scale = (part.unsqueeze(-1) for part in frame(low, high, bits))
    windows, errors = components.unfold(1, size, 1), []
    step = max(1, ELEMENTS // (len(components) * size))
    for start in range(0, windows.shape[1], step):
        cut = slice(start, start + step)
        values = windows[:, cut]
        restored = dequantize(quantize(values, shift[:, cut], scale[:, cut], bits), shift[:, cut], scale[:, cut])
        errors.append(restored.sub_(values).square_().sum((0, 2)).double())
    return torch.cat(errors)


def allocate(errors: dict[tuple[int, int], Tensor], energies: Tensor, budget: int) -> list[Group]:
    """Cut components into groups with bits, and dropped components, so that the squared error is least.

    Args:
        errors: by (size, bits), squared error of the group by its first component.
        energies: squared error of a dropped component, [r].
        budget: most bits of all groups, with `OVERHEAD` bits for each.
    """
    unit = int(np.gcd.reduce([OVERHEAD + size * bits for size, bits in errors]))  # all costs are multiples of it
    options = [(size, bits, (OVERHEAD + size * bits) // unit) for size, bits in errors]
    arrays = [errors[size, bits].numpy(force=True) for size, bits, _ in options]
    dropped, room, rank = energies.numpy(force=True), budget // unit, len(energies)
    best = {0: np.zeros(room + 1)}  # least error of the first components, by bits
    choice = np.zeros((rank + 1, room + 1), dtype=np.uint8)  # 0: dropped, else 1 + index of the last group's option
    for end in range(1, rank + 1):
        row = best[end - 1] + dropped[end - 1]
        for index, (size, _, cost) in enumerate(options):
            if size > end or cost > room:
                continue
            candidate = best[end - size][: room + 1 - cost] + arrays[index][end - size]
            better = candidate < row[cost:]
            row[cost:][better] = candidate[better]
            choice[end, cost:][better] = index + 1
        best[end] = row
        best.pop(end - max(SIZES), None)
    groups, end = [], rank
    while end:
        if not (index := choice[end, room]):
            end -= 1
            continue
        size, bits, cost = options[index - 1]
        end, room = end - size, room - cost
        groups.append(Group(end, size, bits))
    return groups[::-1]


def _runs(groups: Sequence[Group]) -> list[tuple[int, int, int, int]]:
    """Join adjacent groups of equal size and bits: first component, number of groups, size, bits."""
    numbered = groupby(
        enumerate(groups), lambda each: (each[1].start - each[0] * each[1].size, each[1].size, each[1].bits)
    )
    runs = []
    for (_, size, bits), members in numbered:
        members = [group for _, group in members]
        runs.append((members[0].start, len(members), size, bits))
    return runs
