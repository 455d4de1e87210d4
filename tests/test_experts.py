"""The share of experts that tokens reach."""

from types import SimpleNamespace

import pytest

from surgery.running.experts import share_of_experts


def test_tokens_reach_experts_by_chance():
    config = SimpleNamespace(num_local_experts=4, num_experts_per_tok=2)
    shares = [share_of_experts(config, tokens) for tokens in (1, 2, 1000)]
    assert shares == pytest.approx([1 / 2, 3 / 4, 1])
    assert share_of_experts(SimpleNamespace(num_experts_per_tok=2)) == share_of_experts(None) == 1
