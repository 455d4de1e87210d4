"""GPTQ and AWQ formats: matrices stored transposed, packed in int32, with groups along the input dimension.

An element is scale · (code - zero point), with a scale and a zero point per output and group of inputs. Layouts:

- GPTQ: ``X.qweight`` [in · bits / 32, out], consecutive inputs in a word from the least significant bit;
  ``X.g_idx`` [in], the group of each input (with act-order); ``X.qzeros`` [groups, out · bits / 32], zero points minus
  one (``checkpoint_format`` gptq_v2: zero points); ``X.scales`` [groups, out].
- AWQ ("gemm", 4 bits): ``X.qweight`` [in, out / 8] and ``X.qzeros`` [groups, out / 8], eight outputs per word, even
  outputs first, then odd; ``X.scales`` [groups, out].

GPTQ: Frantar et al., arXiv:2210.17323; AWQ: Lin et al., arXiv:2306.00978. Packing follows AutoGPTQ, GPTQModel and
AutoAWQ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.dequantized_store import Matrix, ReadRows
from surgery.checkpoint.quantized.parts import WEIGHT, Quantization, misfit, modules, required_info
from surgery.checkpoint.stores import Store
from surgery.checkpoint.tensors import describe
from surgery.common.errors import SurgeryError

WORDS, ZEROS, SCALES, GROUPS, BIAS = "qweight", "qzeros", "scales", "g_idx", "bias"
BITS = (2, 3, 4, 8)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight outputs in a word."""


def gptq(entry: dict[str, Any], store: Store, dtype: torch.dtype) -> Quantization:
    """Read the format of AutoGPTQ and GPTQModel.

    Raises SurgeryError: a variant of the format is not supported, or tensors of a matrix do not match.
    """
    form = str(entry.get("checkpoint_format") or entry.get("format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported("gptq", form)
    if entry.get("rotation"):
        raise _unsupported("gptq", "rotated weights")
    plus = 0 if form == "gptq_v2" else 1
    matrices = {each: _gptq_matrix(each, entry, store, plus, dtype) for each in modules(store, WORDS)}
    if all(module + BIAS in store.infos for module in matrices):
        matrices = {module: replace(each, no_bias=_is_zero(module + BIAS, store)) for module, each in matrices.items()}
    widths = " and ".join(f"int{bits}" for bits in sorted({matrix.bits for matrix in matrices.values()}))
    return Quantization(f"GPTQ {widths}", _weights(matrices))


def awq(entry: dict[str, Any], store: Store, dtype: torch.dtype) -> Quantization:
    """Read the format of AutoAWQ for its "gemm" kernels.

    Raises SurgeryError: the packing is for other kernels, or tensors of a matrix do not match.
    """
    form = str(entry.get("version") or entry.get("format") or "gemm").lower()
    if form != "gemm":
        raise _unsupported("awq", form)
    return Quantization("AWQ int4", _weights({each: _awq_matrix(each, store, dtype) for each in modules(store, WORDS)}))


@dataclass(frozen=True)
class PackedColumns:
    """Matrix stored transposed, with outputs as columns.

    Attributes:
        module: name prefix of the tensors, with its final dot.
        shape: [outputs, inputs].
        groups: number of groups, of ``group_size`` consecutive inputs each unless ``reordered``.
        reordered: whether ``g_idx`` maps inputs to groups.
        along_inputs: whether a word holds codes of one output (GPTQ) rather than of one input (AWQ).
        plus: added to stored zero points.
        word_order: position of each of eight outputs in a word; None for consecutive order.
        no_bias: whether to drop the stored bias: AutoGPTQ stores a zero bias for each linear layer without one.
    """

    module: str
    shape: tuple[int, int]
    bits: int
    groups: int
    group_size: int
    reordered: bool
    along_inputs: bool
    plus: int
    word_order: tuple[int, ...] | None
    dtype: torch.dtype
    no_bias: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        others = [GROUPS] * self.reordered + [BIAS] * self.no_bias
        return tuple(self.module + part for part in (WORDS, ZEROS, SCALES, *others))

    def rows(self, read: ReadRows, first: int, after: int) -> Tensor:
        """Dequantize outputs [first, after), [after - first, inputs], in float32; reads the codes of all outputs."""
        inputs = self.shape[1]
        words = read(self.module + WORDS, 0, inputs * self.bits // 32 if self.along_inputs else inputs)
        if self.along_inputs:
            codes = unpacked(words[:, first:after].T, torch.arange(inputs), self.bits).T
        else:
            codes = self._outputs(words, first, after)
        zeros = self._zeros(read(self.module + ZEROS, 0, self.groups), first, after)
        scales = read(self.module + SCALES, 0, self.groups)[:, first:after].float()
        group = torch.arange(inputs) // self.group_size
        if self.reordered:
            group = read(self.module + GROUPS, 0, inputs).long()
            if group.min() < 0 or group.max() >= self.groups:
                raise SurgeryError(f"{self.module}{GROUPS}: group index out of range; {self.groups} groups have scales")
        return ((codes - zeros[group]).float() * scales[group]).T.contiguous()

    def _zeros(self, words: Tensor, first: int, after: int) -> Tensor:
        """Unpack zero points [groups, after - first] from words [groups, outputs · bits / 32].

        GPTQModel subtracts one from the zero points in whole words, so that a zero point of 0 borrows from the next:
        adding to whole words reverts it. 3-bit zero points cross words; it subtracts from each separately.
        """
        if self.plus and 32 % self.bits == 0:
            ones = sum(self.plus << shift for shift in range(0, 32, self.bits))
            return self._outputs(words.long() + ones, first, after)
        return (self._outputs(words, first, after) + self.plus) & (2**self.bits - 1)

    def _outputs(self, words: Tensor, first: int, after: int) -> Tensor:
        """Unpack codes [·, after - first] from words [·, outputs · bits / 32]."""
        numbers = torch.arange(first, after)
        if self.word_order is not None:
            numbers = numbers // 8 * 8 + torch.tensor(self.word_order)[numbers % 8]
        return unpacked(words, numbers, self.bits)


def unpacked(words: Tensor, numbers: Tensor, bits: int) -> Tensor:
    """Unpack the codes at indices ``numbers`` as int64 [R, N] from rows of int32 words [R, W].

    The least significant bit comes first; a 3-bit code may cross words. int64 words are taken modulo 2³².
    """
    start = numbers * bits
    word, shift = start // 32, start % 32
    unsigned = words.long() & 0xFFFFFFFF
    after = (word + 1).clamp(max=words.shape[1] - 1)
    return (unsigned[:, word] >> shift | unsigned[:, after] << (32 - shift)) & (2**bits - 1)


def _gptq_matrix(module: str, entry: dict[str, Any], store: Store, plus: int, dtype: torch.dtype) -> PackedColumns:
    words, scales, zeros = (required_info(module, part, store) for part in (WORDS, SCALES, ZEROS))
    order = store.infos.get(module + GROUPS)
    rows, outputs = words.shape if len(words.shape) == 2 else (0, 0)
    # Modules may differ in bit width, which follows from the length of ``g_idx``.
    bits = entry.get("bits") if order is None else 32 * rows / max(order.nbytes // order.dtype.itemsize, 1)
    if bits not in BITS or 32 * rows % bits or not rows or not outputs:
        raise SurgeryError(
            f"{module}{WORDS}: {describe(words)} of {bits} bits per value is not supported; use one of {BITS}"
        )
    bits = int(bits)
    inputs, groups = 32 * rows // bits, scales.shape[0] if scales.shape else 0
    fits = scales.shape == (groups, outputs) and zeros.shape == (groups, -(-outputs * bits // 32)) and groups
    if not fits or words.dtype != torch.int32 or zeros.dtype != torch.int32 or not scales.dtype.is_floating_point:
        raise misfit(module + WEIGHT, words, scales)
    size = entry.get("group_size", -1)
    size = size if isinstance(size, int) and size > 0 else inputs
    if order is None and -(-inputs // size) != groups:
        raise misfit(module + WEIGHT, words, scales)
    if order is not None and (order.shape != (inputs,) or order.dtype != torch.int32):
        raise misfit(module + GROUPS, order, words, "codes")
    return PackedColumns(
        module, (outputs, inputs), bits, groups, size, order is not None, True, plus, word_order=None, dtype=dtype
    )


def _awq_matrix(module: str, store: Store, dtype: torch.dtype) -> PackedColumns:
    words, scales, zeros = (required_info(module, part, store) for part in (WORDS, SCALES, ZEROS))
    inputs, packed = words.shape if len(words.shape) == 2 else (0, 0)
    groups = scales.shape[0] if scales.shape else 0
    fits = (
        words.nbytes
        and groups
        and inputs % groups == 0
        and scales.shape == (groups, 8 * packed)
        and zeros.shape == (groups, packed)
    )
    if not fits or words.dtype != torch.int32 or zeros.dtype != torch.int32 or not scales.dtype.is_floating_point:
        raise misfit(module + WEIGHT, words, scales)
    return PackedColumns(
        module, (8 * packed, inputs), 4, groups, inputs // groups, False, False, 0, word_order=AWQ_ORDER, dtype=dtype
    )


def _is_zero(name: str, store: Store) -> bool:
    raw = torch.empty(store.infos[name].nbytes, dtype=torch.uint8)
    store.read(name, [(0, len(raw))], raw)
    return not raw.any()


def _weights(matrices: dict[str, PackedColumns]) -> dict[str, Matrix]:
    return {module + WEIGHT: matrix for module, matrix in matrices.items()}


def _unsupported(method: str, form: str) -> SurgeryError:
    return SurgeryError(f"config.json: {method} with {form} is not supported; dequantize the checkpoint first")
