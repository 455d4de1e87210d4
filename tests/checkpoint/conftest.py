"""Small checkpoints on disk, and a look at a folder's whole content."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surgery.checkpoint.tensors import DTYPE_OF_NAME


def tensors_of_every_dtype() -> dict[str, torch.Tensor]:
    """One tensor a dtype, with an odd number of bytes where the dtype allows it; a scalar and an empty one."""
    torch.manual_seed(0)
    tensors = {}
    for dtype in DTYPE_OF_NAME.values():
        values = torch.randint(0, 2, (3, 5)) if not dtype.is_floating_point else torch.rand(3, 5) + 0.5
        tensors[f"{str(dtype).removeprefix('torch.')}.weight"] = values.to(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    return tensors


def write_checkpoint(folder: Path, shards: list[dict[str, torch.Tensor]], config: dict | None = None) -> Path:
    """A checkpoint of the safetensors library: one file, or shards with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, hidden ones too, with the content of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def disk(tmp_path: Path):
    """Gives the content of the whole test folder, to compare before and after."""
    return lambda: content_of(tmp_path)


@pytest.fixture
def every_dtype() -> dict[str, torch.Tensor]:
    return tensors_of_every_dtype()


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint in one file: two matrices and a vector."""
    torch.manual_seed(0)
    tensors = {"embed.weight": torch.randn(40, 6), "layers.1.w": torch.randn(4, 6), "layers.10.w": torch.randn(7)}
    return write_checkpoint(tmp_path / "single", [tensors])


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint in two shards of one tensor each."""
    torch.manual_seed(0)
    return write_checkpoint(tmp_path / "sharded", [{"a": torch.randn(4, 6)}, {"b": torch.randn(3)}])
