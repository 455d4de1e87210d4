"""Packed rows: what goes in comes out, every token alone, steps and means in fp32."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.model.token_format import PATTERNS, TokenFormat, runs_problem
from surgery.model.token_quantizer import TokenQuantizer

RUNS = st.lists(st.tuples(st.sampled_from(list(PATTERNS)), st.sampled_from((2, 4, 8, 80))), min_size=1).map(tuple)


def quantizer_of(runs, seed: int = 0) -> TokenQuantizer:
    result = TokenQuantizer(TokenFormat(runs))
    generator = torch.Generator().manual_seed(seed)
    result.step = 0.05 + torch.rand(result.step.shape, generator=generator)
    result.mean = torch.randn(result.mean.shape, generator=generator)
    return result


@settings(max_examples=50, deadline=None)
@given(RUNS, st.integers(0, 9))
def test_codes_survive_packing(runs, seed):
    form = TokenFormat(runs)
    highest = torch.tensor([2**bits - 1 for bits in form.bits()])
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.rand(3, 5, form.channels, generator=generator) * (highest + 1)).long().to(torch.uint8)
    rows = quantizer_of(runs).pack(codes)
    assert rows.shape == (3, 5, form.row_bytes) and rows.dtype == torch.uint8
    assert torch.equal(quantizer_of(runs).unpack(rows), codes)
    assert sum(form.bits()) == 8 * form.row_bytes  # no bit of a row is idle


@settings(max_examples=30, deadline=None)
@given(RUNS, st.integers(0, 9))
def test_a_value_inside_its_range_is_off_by_half_a_step_at_most(runs, seed):
    quantizer = quantizer_of(runs, seed)
    reach = 0.5 * (quantizer.highest + 1) * quantizer.step
    spread = torch.rand(64, len(reach), generator=torch.Generator().manual_seed(seed)) * 2.4 - 1.2
    values = quantizer.mean + spread * reach
    read = quantizer.decode(quantizer.encode(values), torch.float32)
    inside = ~quantizer.clipped(values)
    assert 0 < float(inside.float().mean()) < 1
    assert bool(((read - values).abs() <= 0.5001 * quantizer.step)[inside].all())
    assert torch.equal(read, quantizer.read(values))
    ends = quantizer.mean + values.sub(quantizer.mean).sign() * (reach - 0.5 * quantizer.step)
    torch.testing.assert_close(read[~inside], ends[~inside])


def test_a_row_depends_on_its_token_alone():
    quantizer, values = quantizer_of((("5+3", 4), ("3+3+2", 2))), torch.randn(2, 1, 9, 14)
    rows = quantizer.encode(values)
    assert torch.equal(torch.cat([quantizer.encode(part) for part in values.split(2, dim=2)], dim=2), rows)
    assert torch.equal(quantizer.encode(values.flip(0)), rows.flip(0))


def test_steps_and_means_stay_fp32():
    quantizer = quantizer_of((("4+4", 4),))
    cast = copy.deepcopy(quantizer).to(torch.bfloat16)
    assert torch.equal(cast.step, quantizer.step) and torch.equal(cast.mean, quantizer.mean)
    empty = quantizer_of((("4+4", 4),)).to("meta").to_empty(device="cpu")
    assert empty.step.dtype == torch.float32 and torch.equal(empty.highest, quantizer.highest)
    values = torch.randn(7, 8).bfloat16()
    assert torch.equal(cast.encode(values), quantizer.encode(values.float()))


@pytest.mark.parametrize(("name", "value"), [("step", 0.0), ("step", -1.0), ("step", torch.inf), ("mean", torch.nan)])
def test_damaged_steps_are_refused_before_anything_is_read(name, value):
    quantizer = quantizer_of((("4+4", 4),))
    getattr(quantizer, name)[3] = value
    with pytest.raises(ValueError, match="channel 3"):
        quantizer.check()


@pytest.mark.parametrize(
    ("runs", "channels"),
    [((("4+4", 3),), 6), ((("4+4", 4),), 7), ((("7", 4),), 4), ((("8", 0),), 0), ((("8", 2.0),), 2)],
)
def test_runs_that_are_no_row(runs, channels):
    assert runs_problem(runs, channels)


def test_gradients_pass_where_values_are_not_clipped():
    quantizer = quantizer_of((("2+2+2+2", 2),))
    values = (quantizer.mean + 4 * quantizer.step * torch.linspace(-1, 1, 8)).requires_grad_()
    with torch.enable_grad():
        quantizer.unclipped(values).sum().backward()
    assert torch.equal(values.grad.bool(), ~quantizer.clipped(values.detach()))
