"""Quantized matrices whose parts and config do not belong together: read as something of their shape, or refused."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hostile import JUNK, cases, mutated, taken_or_refused
from hypothesis import given
from hypothesis import strategies as st
from quantized_checkpoints import FORMATS

from surgery.checkpoint.dequantized_store import DequantizedStore
from surgery.checkpoint.quantized import quantized_matrices
from surgery.checkpoint.tensors import TensorInfo, as_bytes

WEIGHT = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
MODULE = "model.layers.0.mlp.up_proj."
DTYPES = (torch.int32, torch.uint8, torch.int8, torch.float32, torch.float16, torch.int64, torch.float8_e4m3fn)
SHAPES = st.lists(st.sampled_from((0, 1, 2, 3, 4, 8, 16, 32, 64, 256)), max_size=3)


class InMemory:
    """A store of tensors, which reads nothing beyond their ends."""

    max_readers = 1

    def __init__(self, tensors):
        self._bytes = {name: as_bytes(tensor) for name, tensor in tensors.items()}
        self.infos = {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.nbytes, "a.safetensors")
            for name, tensor in tensors.items()
        }

    def read(self, name, ranges, out):
        values, at = self._bytes[name], 0
        for start, stop in ranges:
            assert 0 <= start <= stop <= len(values), (name, start, stop, len(values))
            out[at : at + stop - start] = values[start:stop]
            at += stop - start


@st.composite
def tensors(draw, parts):
    """Draw those parts with up to two of them of another dtype, shape or content, or left out."""
    result = dict(parts)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(result) or [""]))
        if not draw(st.booleans()):
            result.pop(name, None)
            continue
        shape, dtype = draw(SHAPES), draw(st.sampled_from((*DTYPES, getattr(result.get(name), "dtype", torch.uint8))))
        chance, count = torch.Generator().manual_seed(draw(st.integers(0, 99))), torch.Size(shape).numel()
        raw = torch.randint(256, (max(1, count) * dtype.itemsize,), dtype=torch.uint8, generator=chance)
        result[name] = raw.view(dtype)[:count].view(shape)
    return result


@pytest.mark.parametrize("kind", FORMATS)
@given(st.data())
@cases(6)
def test_parts_that_do_not_belong_together(kind, data):
    message, quantize = FORMATS[kind]
    parts = data.draw(tensors(quantize(WEIGHT)))
    config = {"quantization_config": data.draw(mutated(message, JUNK) | st.just(message)), "dtype": "bfloat16"}
    store = InMemory({MODULE + part: tensor.contiguous() for part, tensor in parts.items()})
    result = taken_or_refused(lambda: quantized_matrices(config, store, Path("model")))
    if not result:
        return
    read = DequantizedStore(store, result)
    for name, info in read.infos.items():
        out = torch.empty(info.nbytes, dtype=torch.uint8)
        taken_or_refused(partial(read.read, name, [(0, info.nbytes)], out))
