"""Kernels run in Triton's interpreter here unless there is a GPU, and in memory full of NaN."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN, so that whatever a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> torch.device:
    """Return the device on which kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
