"""Fixtures of evaluations."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick(short_decoding):
    """Evaluations are of what is done with measurements."""
