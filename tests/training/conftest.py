"""Checkpoints that healings begin with; nothing writes to them."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    from tiny_models import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("teacher"), "llama")


@pytest.fixture(scope="session")
def student(tmp_path_factory) -> Path:
    """The teacher's shape with other weights."""
    from tiny_models import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("student"), "llama", seed=1)
