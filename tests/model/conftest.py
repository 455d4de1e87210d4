"""Every family of the custom model class, as tiny random models."""

import pytest
import torch
from own_models import FAMILIES, tiny_source
from transformers import PreTrainedModel

from surgery.transforms.algebra import torch_threads


@pytest.fixture(autouse=True)
def one_thread_and_no_gradients():
    """Use one thread: on matrices this small threads only wait for each other, up to 200 times as long on a busy
    machine."""
    with torch_threads(1), torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def source(family) -> PreTrainedModel:
    return tiny_source(family)
