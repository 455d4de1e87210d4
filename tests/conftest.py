"""Fixtures for all tests."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Gives the folder of a tiny checkpoint by family name, made once."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = make_checkpoint(tmp_path_factory.mktemp(name), name, dtype)
        return made[name, dtype]

    return get
