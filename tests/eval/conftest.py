"""Fixtures of measurements."""

import pytest
import torch


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield
