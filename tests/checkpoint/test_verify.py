"""Verification finds every way in which a folder can differ from its plan."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.checkpoint import TensorSpec, verify_files
from surgery.checkpoint.tensors import NAME_OF_DTYPE, all_finite
from surgery.common.errors import SurgeryError


@pytest.fixture
def plan(single):
    return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in load_file(single / "model.safetensors").items()}


def test_equal(single, sharded, plan):
    verify_files(single, plan)
    verify_files(sharded, {"a": torch.empty(4, 6, device="meta"), "b": torch.empty(3, device="meta")})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers.1.w": None}, "layers.1.w is missing"),
        ({"extra": torch.ones(1)}, "extra is not in the plan"),
        ({"layers.1.w": torch.ones(6, 4)}, r"layers.1.w is float32 [6, 4] instead of float32 [4, 6]"),
        ({"layers.1.w": torch.ones(4, 6).half()}, "layers.1.w is float16 [4, 6] instead of float32"),
        ({"layers.1.w": torch.full((4, 6), torch.inf)}, "layers.1.w contains NaN or infinity"),
        ({"layers.1.w": None, "extra": torch.ones(1)}, "layers.1.w is missing; extra is not in the plan"),
    ],
)
def test_differences(single, plan, change, words):
    path = single / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(path) | change).items() if tensor is not None}
    save_file(tensors, path)
    with pytest.raises(SurgeryError) as caught:
        verify_files(single, plan)
    assert words in str(caught.value)


def test_many_differences_are_cut_short_and_the_config_must_load(single, plan):
    plan |= {f"x{i}": TensorSpec(torch.float32, (1,)) for i in range(8)}
    with pytest.raises(SurgeryError, match=r"x0 is missing; .* x4 is missing; and 3 more$"):
        verify_files(single, plan)
    (single / "config.json").write_text("{")
    with pytest.raises(SurgeryError, match="not valid JSON"):
        verify_files(single, plan)


@pytest.mark.parametrize("dtype", [dtype for dtype in NAME_OF_DTYPE if dtype.is_floating_point], ids=str)
@pytest.mark.parametrize("length", [1, 7, 100, 5000])
def test_one_non_finite_value_anywhere(dtype, length):
    tensor = torch.ones(length).to(dtype)
    assert all_finite(tensor)
    for position in {0, length // 3, length // 2, length - 1}:
        for value in (torch.nan, torch.inf, -torch.inf):
            bad = torch.ones(length)
            bad[position] = value
            bad = bad.to(dtype)
            # Some fp8 kinds have no infinity and saturate.
            assert all_finite(bad) == bool(torch.isfinite(bad.float()).all()), (position, value)


def test_non_finite_value_at_the_end_of_many_pieces(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tensors = {"bf16": torch.ones(9_000_000, dtype=torch.bfloat16), "fp8": torch.ones(3_000_000).to(torch.float8_e5m2)}
    for name in (None, *tensors):
        if name:
            tensors[name][-1] = torch.nan
        save_file(tensors, tmp_path / "model.safetensors")
        if name is None:
            verify_files(tmp_path, tensors)
            continue
        with pytest.raises(SurgeryError, match=f"{name} contains NaN"):
            verify_files(tmp_path, tensors)


def test_integers_and_empty_tensors_are_finite():
    assert all_finite(torch.ones(3, dtype=torch.int8))
    assert all_finite(torch.ones(0, 4))
