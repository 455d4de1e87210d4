"""Tensors that grow in place: the values of `torch.cat`, in memory that stays and that nobody else writes to."""

import copy

import pytest
import torch

from surgery.model.growing import LEAST_ROOM, MOST_ROOM, append, refill
from surgery.model.left_padding import LeftPadding
from surgery.model.step_memo import once


def entries(size: int, dim: int = -2, **settings) -> torch.Tensor:
    shape = [2, 3, 4, 5]
    shape[dim] = size
    return torch.randn(shape, **settings)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("capacity", [0, 30])
def test_values_are_those_of_cat(dim, capacity):
    values, parts = None, [entries(size, dim) for size in (3, 1, 1, 20, 1, 0, 600, 1)]
    for number in range(len(parts)):
        values = append(values, parts[number], dim, capacity=capacity)
        assert torch.equal(values, torch.cat(parts[: number + 1], dim=dim))


def test_memory_moves_seldom_and_has_little_to_spare():
    values, addresses = None, set()
    for _ in range(2000):
        values = append(values, entries(1))
        addresses.add(values.data_ptr())
        room = values.untyped_storage().nbytes() // (2 * 3 * 5 * 4) - values.shape[-2]
        assert room <= min(max(values.shape[-2], LEAST_ROOM), MOST_ROOM)
    assert len(addresses) <= 13
    values = append(None, entries(3), capacity=50)
    address = values.data_ptr()
    for _ in range(47):
        values = append(values, entries(1))
    assert values.data_ptr() == address and values.untyped_storage().nbytes() == values.numel() * 4


def test_copies_and_slices_never_write_to_what_others_hold():
    first = append(None, entries(3))
    second, third = append(first, entries(1)), append(first, entries(1))
    assert second.data_ptr() == first.data_ptr() != third.data_ptr()
    before = second.clone()
    for other in (second[..., :2, :], second[:1], copy.deepcopy(second), second.clone()):
        append(other, entries(2)[: len(other)])
        refill(other, entries(2)[: len(other)], max_size=9)
    assert torch.equal(second, before)
    twin = copy.deepcopy(second)
    assert append(twin, entries(1)).data_ptr() == twin.data_ptr(), "a copy of a cache has the room of the cache"


def test_refilled_memory_stays_up_to_the_most():
    values = refill(None, entries(0), max_size=6)
    values = refill(values, entries(4), max_size=6)
    address = values.data_ptr()
    for size in (6, 0, 5):
        new = entries(size)
        values = refill(values, new, max_size=6)
        assert torch.equal(values, new) and (values.data_ptr() == address or not size)
    assert values.untyped_storage().nbytes() == 6 * 2 * 3 * 5 * 4


@torch.enable_grad()
def test_gradients_go_through_and_dtypes_widen():
    parts = [entries(2, requires_grad=True) for _ in range(3)]
    values = None
    for part in parts:
        values = append(values, part)
    values.square().sum().backward()
    assert all(torch.equal(part.grad, 2 * part) for part in parts)
    assert append(append(None, entries(2).half()), entries(1)).dtype == torch.float32


def test_what_inference_mode_allocated_is_left_alone_outside():
    with torch.inference_mode():
        values = append(None, entries(2))
    assert append(values, entries(1)).shape[-2] == 3


def test_results_are_made_once_until_the_step_or_the_values_change():
    shared, result = torch.zeros(3), []

    def ask(key, step=None):
        return once(shared, key, lambda: result.append(key) or len(result), step)

    assert [ask("a"), ask("b"), ask("a")] == [1, 2, 1]
    assert [ask("a", 5), ask("a", 5), ask("a", 6)] == [3, 3, 4]
    shared += 1
    assert ask("a", 6) == 5


def test_padding_is_read_once_and_follows_rows():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]])
    padding = LeftPadding.of_mask(mask)
    assert (padding.tolist(), padding.least, padding.most, padding.has_gaps) == ([2, 0, 1], 0, 2, True)
    assert not LeftPadding.of_mask(mask[:2]).has_gaps
    rows = padding.on(torch.device("cpu"))
    assert padding.on(torch.device("cpu")) is rows
    selection = padding.changed(lambda each: each[[2, 2]])
    assert (selection.tolist(), selection.least, selection.most) == ([1, 1], 0, 2)
