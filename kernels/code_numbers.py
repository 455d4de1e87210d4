"""Codes as numbers within kernels; `quantization` says what they are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number(codes, shift, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """The numbers, fp32, of codes of BITS bits that begin at bit `shift`: by arithmetic, faster than conversion."""
    bits = codes.to(tl.int32) >> shift
    if FLOAT:
        # The exponent is 120 too small in the place of fp32's; subnormal ones come out right, too.
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    # An integer below 2^23 is the mantissa of 2^23 plus it.
    return ((bits & (2**BITS - 1)) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
