"""Frequencies that keep RoPE: each layer's own where a class holds them, one list for all where it does not."""

from types import SimpleNamespace

import pytest
import torch

from surgery.structures.mla.plans import Planner, search_plans
from surgery.transforms import mla

KV_HEADS, HEAD_DIM = 2, 8
NORMS = torch.tensor([[9.0, 1, 1, 8], [1, 7, 1, 6]]), torch.tensor([[2.0, 5, 1, 1], [1, 4, 1, 1]])


def plan(*, one_list: bool) -> list[list[int]]:
    """Components of each frequency that two layers keep, three of eight in each; a third layer stays unchanged."""
    anatomy = SimpleNamespace(kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    library = SimpleNamespace(
        load=lambda layer: (SimpleNamespace(query_norm=torch.ones(2 * KV_HEADS, 4), key_norm=NORMS[layer]), None)
    )
    method, split, entries = mla.METHODS["mha2mla"], mla.Split(rope_dim=6, rank=10), frozenset([2])
    opened = SimpleNamespace(anatomy=lambda _: anatomy, layers=3)
    result = Planner(method, opened, library, "free", entries).alike(split, one_list=one_list)
    return [counts.tolist() for counts in result.counts]


def test_layers_keep_the_frequencies_that_they_need():
    assert plan(one_list=False) == [[1, 1, 0, 1], [1, 2, 0, 0], [0, 0, 0, 0]]


def test_one_list_is_of_the_largest_shares_of_all_layers():
    assert plan(one_list=True) == [[1, 1, 0, 1]] * 3


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("folds", [False, True])
def test_the_least_of_a_valley_is_found_by_trying_few(count, folds):
    def losses_of(attempts):
        requests.extend(plan.index for plan in attempts)
        return [abs(plan.index - least) for plan in attempts]

    every = [SimpleNamespace(index=index, method=SimpleNamespace(folds=folds)) for index in range(count)]
    for least in range(count):
        requests = []
        result = search_plans(every, losses_of)
        assert min(result, key=result.__getitem__) == least and sorted(result) == sorted(requests)
        assert len(requests) == count if folds else len(requests) <= (count + 3) // 2  # half of them and one more
