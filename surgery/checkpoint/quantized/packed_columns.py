"""GPTQ and AWQ: a matrix stored transposed, its codes packed in int32 and grouped along the inputs.

A number is scale · (code - zero), of one scale and zero for each output and group of inputs. With ``bits`` of a code:

- GPTQ: ``X.qweight`` [in · bits / 32, out], one input after the other from the least significant bit on;
  ``X.g_idx`` [in] says the group of every input where they were reordered; ``X.qzeros`` [groups, out · bits / 32] holds
  zeros less one (``checkpoint_format`` gptq_v2: the zeros themselves); ``X.scales`` [groups, out].
- AWQ ("gemm", 4 bits): ``X.qweight`` [in, out / 8] and ``X.qzeros`` [groups, out / 8], of eight outputs first the even
  ones and then the odd ones; ``X.scales`` [groups, out].

GPTQ: Frantar et al., arXiv:2210.17323; AWQ: Lin et al., arXiv:2306.00978. Codes are packed as AutoGPTQ, GPTQModel
and AutoAWQ do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.dequantized_store import Matrix, ReadRows
from surgery.checkpoint.quantized.parts import WEIGHT, Quantization, beside, misfit, modules
from surgery.checkpoint.stores import Store
from surgery.checkpoint.tensors import describe
from surgery.common.errors import SurgeryError

WORDS, ZEROS, SCALES, GROUPS, BIAS = "qweight", "qzeros", "scales", "g_idx", "bias"
BITS = (2, 3, 4, 8)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output of each of the eight codes in a word."""


def gptq(entry: dict[str, Any], store: Store, dtype: torch.dtype) -> Quantization:
    """Read the format of AutoGPTQ and GPTQModel.

    Raises:
        SurgeryError: a format of them that is not read, or tensors that do not fit each other.
    """
    form = str(entry.get("checkpoint_format") or entry.get("format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise _unread("gptq", form)
    if entry.get("rotation"):
        raise _unread("gptq", "rotated weights")
    plus = 0 if form == "gptq_v2" else 1
    matrices = {each: _gptq_matrix(each, entry, store, plus, dtype) for each in modules(store, WORDS)}
    if all(module + BIAS in store.infos for module in matrices):
        matrices = {module: replace(each, no_bias=_is_zero(module + BIAS, store)) for module, each in matrices.items()}
    widths = " and ".join(f"int{bits}" for bits in sorted({matrix.bits for matrix in matrices.values()}))
    return Quantization(f"GPTQ {widths}", _named(matrices))


def awq(entry: dict[str, Any], store: Store, dtype: torch.dtype) -> Quantization:
    """Read the format of AutoAWQ for its "gemm" kernels.

    Raises:
        SurgeryError: the packing of other kernels, or tensors that do not fit each other.
    """
    form = str(entry.get("version") or entry.get("format") or "gemm").lower()
    if form != "gemm":
        raise _unread("awq", form)
    return Quantization("AWQ int4", _named({each: _awq_matrix(each, store, dtype) for each in modules(store, WORDS)}))


@dataclass(frozen=True)
class PackedColumns:
    """A matrix whose outputs are the columns of what is stored.

    Attributes:
        module: whose tensors they are, with its last dot.
        shape: of the matrix, outputs and inputs.
        groups: of inputs, and ``group_size`` inputs in each, where ``reordered`` does not have ``g_idx`` say it.
        along_inputs: whether a word holds codes of one output, not of one input.
        plus: to be added to stored zeros.
        places: of eight outputs in a word, None for one after the other.
        no_bias: its bias is no part of the model: AutoGPTQ stored one of zeros next to every matrix that had none.
    """

    module: str
    shape: tuple[int, int]
    bits: int
    groups: int
    group_size: int
    reordered: bool
    along_inputs: bool
    plus: int
    places: tuple[int, ...] | None
    dtype: torch.dtype
    no_bias: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        others = [GROUPS] * self.reordered + [BIAS] * self.no_bias
        return tuple(self.module + part for part in (WORDS, ZEROS, SCALES, *others))

    def rows(self, read: ReadRows, first: int, after: int) -> Tensor:
        """Outputs [first, after), [after - first, inputs], in float32; all codes are read, which lie in columns."""
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
                raise SurgeryError(f"{self.module}{GROUPS}: names groups outside of the {self.groups} that have scales")
        return ((codes - zeros[group]).float() * scales[group]).T.contiguous()

    def _zeros(self, words: Tensor, first: int, after: int) -> Tensor:
        """Zeros [groups, after - first] of words [groups, outputs · bits / 32].

        GPTQModel took one from each zero by a subtraction from whole words, in which a zero of 0 borrowed from the
        next: the same addition gives it back. Of 3 bits, which cross words, it took one from each by itself.
        """
        if self.plus and 32 % self.bits == 0:
            ones = sum(self.plus << place for place in range(0, 32, self.bits))
            return self._outputs(words.long() + ones, first, after)
        return (self._outputs(words, first, after) + self.plus) & (2**self.bits - 1)

    def _outputs(self, words: Tensor, first: int, after: int) -> Tensor:
        """Codes [·, after - first] of words [·, outputs · bits / 32]."""
        numbers = torch.arange(first, after)
        if self.places is not None:
            numbers = numbers // 8 * 8 + torch.tensor(self.places)[numbers % 8]
        return unpacked(words, numbers, self.bits)


def unpacked(words: Tensor, numbers: Tensor, bits: int) -> Tensor:
    """Codes in int64, of those ``numbers``, [R, N], that lie one after the other in rows of int32 [R, W].

    The least significant bit is first; a code of 3 bits may begin in one word and end in the next. Words in int64 count
    modulo 2³².
    """
    start = numbers * bits
    word, shift = start // 32, start % 32
    unsigned = words.long() & 0xFFFFFFFF
    after = (word + 1).clamp(max=words.shape[1] - 1)
    return (unsigned[:, word] >> shift | unsigned[:, after] << (32 - shift)) & (2**bits - 1)


def _gptq_matrix(module: str, entry: dict[str, Any], store: Store, plus: int, dtype: torch.dtype) -> PackedColumns:
    words, scales, zeros = (beside(module, part, store) for part in (WORDS, SCALES, ZEROS))
    order = store.infos.get(module + GROUPS)
    rows, outputs = words.shape if len(words.shape) == 2 else (0, 0)
    # Groups of modules may have bits of their own, which the order of the inputs tells.
    bits = entry.get("bits") if order is None else 32 * rows / max(order.nbytes // order.dtype.itemsize, 1)
    if bits not in BITS or 32 * rows % bits or not rows or not outputs:
        raise SurgeryError(f"{module}{WORDS}: {describe(words)} of {bits} bits a code; {BITS} are read")
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
        module, (outputs, inputs), bits, groups, size, order is not None, True, plus, places=None, dtype=dtype
    )


def _awq_matrix(module: str, store: Store, dtype: torch.dtype) -> PackedColumns:
    words, scales, zeros = (beside(module, part, store) for part in (WORDS, SCALES, ZEROS))
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
        module, (8 * packed, inputs), 4, groups, inputs // groups, False, False, 0, places=AWQ_PLACES, dtype=dtype
    )


def _is_zero(name: str, store: Store) -> bool:
    raw = torch.empty(store.infos[name].nbytes, dtype=torch.uint8)
    store.read(name, [(0, len(raw))], raw)
    return not raw.any()


def _named(matrices: dict[str, PackedColumns]) -> dict[str, Matrix]:
    return {module + WEIGHT: matrix for module, matrix in matrices.items()}


def _unread(method: str, form: str) -> SurgeryError:
    return SurgeryError(f"config.json: {method}, {form}: not read; dequantize the checkpoint first")
