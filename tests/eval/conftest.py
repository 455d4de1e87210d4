"""Fixtures of evaluations."""

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """That of the demo model; not to be changed."""
    from tiny_models import DEMO
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)
