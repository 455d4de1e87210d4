"""Every family of the own class, as tiny random models."""

import pytest
import torch
from own_models import FAMILIES, tiny_source
from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def one_thread_and_no_gradients():
    """On matrices this small threads only wait for each other, up to 200 times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def source(family) -> PreTrainedModel:
    return tiny_source(family)
