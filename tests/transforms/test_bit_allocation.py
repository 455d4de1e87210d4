"""Bits by latent: no other choice under the same budget costs less, and the noise is that of the codes."""

import itertools

import pytest
import torch

from surgery.model.quantization import dequantize, quantize
from surgery.transforms.bit_allocation import FORMATS, allocate_bits, noise

PRICES, GROUP, SCALE = {"int8": 9, "int4": 5, "int3": 4, "int2": 3, None: 0}, 32, 16


NOISE = {form: noise(bits, GROUP) for form, bits in FORMATS.items()} | {None: 1.0}


def cost_of(spectra, chosen):
    energies = [float(energy) for spectrum in spectra for energy in spectrum]
    return sum(energy * NOISE[form] for energy, form in zip(energies, chosen, strict=True))


def test_no_other_choice_of_that_price_costs_less():
    spectra = [torch.tensor([100.0, 3.0, 0.2]), torch.tensor([20.0, 1.0, 0.01])]
    for budget in (8, 15, 20, 26, 33):
        spans = allocate_bits(spectra, budget, GROUP, SCALE)
        chosen = [[form for form, count in each for _ in range(count)] for each in spans]
        assert all(each for each in chosen)
        chosen = [forms + [None] * (3 - len(forms)) for forms in chosen]
        chosen = [form for forms in chosen for form in forms]
        spent = sum(PRICES[form] for form in chosen)
        assert spent <= budget
        others = itertools.product(PRICES, repeat=6)
        best = min(
            cost_of(spectra, each)
            for each in others
            if sum(PRICES[form] for form in each) <= spent and each[0] and each[3]
        )
        assert cost_of(spectra, chosen) == pytest.approx(best)


def test_first_latents_have_the_most_bits():
    spans = allocate_bits([torch.logspace(3, -3, 64)], 200, 64, 16)[0]
    assert [form for form, _ in spans] == ["int8", "int4", "int3", "int2"]


def test_a_budget_below_one_latent_a_layer():
    with pytest.raises(ValueError, match="5 bits per token cannot be spread over 2 layers"):
        allocate_bits([torch.ones(4)] * 2, 5, GROUP, SCALE)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("form", FORMATS)
def test_the_noise_is_that_of_codes(form, group):
    values = torch.randn(4096, group, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    error = (dequantize(*quantize(values, form, -1, clip=True)) - values).square().mean()
    assert noise(FORMATS[form], group) == pytest.approx(float(error), rel=0.02)
