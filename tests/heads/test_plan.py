"""Plans: the best units stay full as long as the budget lasts."""

import pytest
import torch

from surgery.common.errors import SurgeryError
from surgery.heads.plan import compile_plan

SINGLE = [[(head,) for head in range(4)] for _ in range(2)]  # every KV head for itself, of two layers
SCORES = torch.tensor([[0.9, 0.1, 0.5, 0.2], [0.3, 0.8, 0.05, 0.6]])


def at_most(count):
    return lambda full: int(full.sum()) <= count


def test_the_best_heads_stay_full():
    for count in range(9):
        plan = compile_plan(SCORES, SINGLE, at_most(count), 4, 8)
        best = SCORES.flatten().topk(count).indices
        assert plan.full.flatten().nonzero().flatten().tolist() == sorted(best.tolist())
        assert plan.streams.float().mean().item() == pytest.approx(1 - count / 8)
        assert (plan.sinks, plan.recent) == (4, 8)
    plan = compile_plan(torch.zeros(2, 4), SINGLE, at_most(3), 4, 8)
    assert plan.full.flatten().tolist() == [True] * 3 + [False] * 5


def test_full_heads_come_first():
    plan = compile_plan(SCORES, SINGLE, at_most(4), 4, 8)
    assert plan.order(0) == [0, 2, 1, 3] and plan.order(1) == [1, 3, 0, 2]


def test_heads_of_one_unit_go_together():
    units = [[(0, 1), (2, 3)], [(0, 1, 2, 3)]]
    plan = compile_plan(SCORES, units, at_most(6), 4, 8)
    # Layer 1 has a head of 0.8, but needs four; the budget ends before it would fit with the best unit.
    assert plan.full.tolist() == [[True] * 2 + [False] * 2, [True] * 4]


def test_an_impossible_budget_says_what_to_do():
    with pytest.raises(SurgeryError, match="raise --kv-ratio"):
        compile_plan(SCORES, SINGLE, lambda full: False, 4, 8)
