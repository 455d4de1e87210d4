"""The share of experts that a token activates."""

from types import SimpleNamespace

from surgery.running.experts import share_of_experts


def test_share_of_experts():
    assert share_of_experts(SimpleNamespace(num_local_experts=4, num_experts_per_tok=2)) == 1 / 2
    assert share_of_experts(SimpleNamespace(num_experts_per_tok=2)) == share_of_experts(None) == 1
