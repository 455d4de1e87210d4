"""Every test here runs with little memory to spare: what a file claims must not be allocated."""

import pytest
from hostile import bounded_memory


@pytest.fixture(autouse=True)
def little_memory():
    with bounded_memory():
        yield
