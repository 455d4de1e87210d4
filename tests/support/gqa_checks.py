"""Makes sure that tests of kernels test kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def only_kernels(operator: str) -> Iterator[None]:
    """Within it, an operator of the module named `operator` fails where it would run as its reference."""

    def fail(operation: str, reason: str) -> None:
        pytest.fail(f"{operation} would have run in plain PyTorch: {reason}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{operator}.tell_once", fail)
        yield
