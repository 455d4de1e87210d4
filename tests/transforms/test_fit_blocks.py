"""A fit that several processes share has the bits of one, and each linearises its own sequences only."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from surgery.calibration.parts import Parts
from surgery.calibration.settings import ConversionSettings
from surgery.families.anatomy import AttentionAnatomy
from surgery.running.processes import ALONE, Processes
from surgery.running.source import Source
from surgery.transforms import attention_fit
from surgery.transforms.effort import Effort
from surgery.transforms.fit_blocks import sample_blocks
from surgery.transforms.key_basis import identity_basis
from surgery.transforms.kv_heads_fit import fit_merged_layer
from surgery.transforms.latent_fit import fit_latent_layer
from surgery.transforms.low_rank_fit import fit_low_rank_layer
from surgery.transforms.low_rank_layer import Block, LowRankLayer
from surgery.transforms.partial_rope import latent_form

# Processes are threads here, and how many threads a product takes is a whole process's.
pytestmark = pytest.mark.usefixtures("one_core")

SEQUENCES, TOKENS = 11, 20


class OfThreads(Processes):
    """One of several that are threads; what they hand each other is pickled, as between processes."""

    def __init__(self, rank, count, board, barrier):
        super().__init__(alone=True)
        self.rank, self.count, self._state, self._board, self._barrier = rank, count, self, board, barrier

    def _from(self, rank, outcome):
        if self.rank == rank:
            self._board[0] = pickle.dumps(outcome)
        self._barrier.wait(60)
        result, refusal = pickle.loads(self._board[0])
        self._barrier.wait(60)
        assert refusal is None
        return result


def together(count, function):
    """What each of so many processes gets of ``function(processes)``, in threads named by their rank."""
    board, barrier = [None], threading.Barrier(count)

    def run(rank):
        threading.current_thread().name = str(rank)
        try:
            return function(OfThreads(rank, count, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def anatomy(checkpoints) -> AttentionAnatomy:
    opened = Source.open(checkpoints("qwen2"), ConversionSettings())
    return opened.anatomy(opened.first_layer).to(torch.float32)


def fit_of(kind, checkpoints):
    """A fit but for inputs, targets and so on, with matrices that are not yet what it finds."""
    generator, source = torch.Generator().manual_seed(1), anatomy(checkpoints)
    if kind == "latent":
        exact = source.to(torch.float64)
        layer = latent_form(exact, identity_basis(exact.kv_heads, exact.head_dim // 2), torch.arange(3))
        return partial(fit_latent_layer, layer.to(torch.float32)), source.hidden
    if kind == "merged":
        return partial(fit_merged_layer, source), source.hidden
    rank, groups, dim = 6, source.kv_heads, source.head_dim
    down = torch.randn(rank, source.hidden, generator=generator)
    key_up, value_up = (0.3 * torch.randn(groups, dim, rank, generator=generator) for _ in range(2))
    blocks = (Block(rank, tuple(range(groups)), tuple(range(groups))),)
    return partial(fit_low_rank_layer, LowRankLayer(source, blocks, down, key_up, value_up)), source.hidden


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["latent", "merged", "low rank"])
def test_bits_are_those_of_one(kind, count, checkpoints, monkeypatch):
    fit, hidden = fit_of(kind, checkpoints)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(SEQUENCES, TOKENS, hidden, generator=generator) for _ in range(2))
    linearised, linearise = set(), attention_fit._linearised

    def counting(make, unknowns, place):
        linearised.add((threading.current_thread().name, place.sequence))
        return linearise(make, unknowns, place)

    run = partial(fit, inputs, targets, torch.eye(hidden), Effort(steps=2, iterations=3, queries=9))
    alone = run(processes=ALONE)
    monkeypatch.setattr(attention_fit, "_linearised", counting)
    for layer, before, after in together(count, lambda processes: run(processes=processes)):
        assert (before, after) == alone[1:]
        for name, value in vars(alone[0]).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(layer, name)), name
    assert len(linearised) == SEQUENCES and len({rank for rank, _ in linearised}) == count


def test_numbers_are_drawn_as_by_one():
    """Parts draw what one generator gives their blocks, one after the other."""
    parts, generator = Parts(SEQUENCES, 1), torch.Generator().manual_seed(2)
    blocks = sample_blocks(parts, (SEQUENCES, TOKENS), 7, generator, torch.device("cpu"), keep=True)
    own, one = blocks.generators(3, 5), torch.Generator().manual_seed(5)
    for part in range(parts.count):
        for place in blocks.items(part):
            shape = len(place.positions), 3
            assert torch.equal(torch.randn(shape, generator=own[part]), torch.randn(shape, generator=one))
