"""The exact stages, for every family: merge and rotation change nothing."""

from dataclasses import replace

import pytest
import torch
from tiny_models import ALL, OWN_SOFTMAX

from surgery.calibration.statistics import LayerStatistics
from surgery.families import attention
from surgery.kernels.mla_decode.reference import causal_mask, shared_attention
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms import mla
from surgery.transforms.algebra import damp, left_root
from surgery.transforms.key_basis import energy_basis, folded_basis, identity_basis
from surgery.transforms.partial_rope import latent_form, latent_rows, truncate


def random_moment(groups: int, dim: int, seed: int) -> torch.Tensor:
    root = torch.randn(groups * dim, groups * dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (root @ root.T).view(groups, dim, groups, dim)


def bases(groups: int, dim: int):
    moment, metric = random_moment(groups, dim, 0), random_moment(groups, dim, 1)
    return {
        "merged": identity_basis(groups, dim // 2),
        "complex": energy_basis(moment, None),
        "fisher": energy_basis(moment, metric),
        "unfolded": folded_basis(moment, 1, dim // 2),
    }


@pytest.fixture
def case(request, checkpoints):
    opened = Source.open(checkpoints(request.param), ConvertSettings())
    anatomy = opened.anatomy(opened.first_layer).to(torch.float64)
    x = torch.randn(2, 33, anatomy.hidden, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return anatomy, x, attention.output(anatomy, attention.attend(anatomy, anatomy.project(x)), x)


@pytest.mark.parametrize("case", ALL, indirect=True)
def test_merge_and_rotation_and_a_full_rank_are_exact(case):
    """Truncation to all dimensions, through an ill-conditioned basis of the latent, changes nothing either."""
    anatomy, x, want = case
    every = bases(anatomy.kv_heads, anatomy.head_dim)
    for name, basis in every.items():
        form = latent_form(anatomy, basis, torch.arange(basis.components))
        assert form.rank + form.rope_dim == anatomy.kv_width
        error = (form.forward(x) - want).abs().max() / want.abs().max()
        assert error < 1e-9, name
        torch.testing.assert_close(replace(form, rotates_all=True).attend(x), form.attend(x))
    form = latent_form(anatomy, every["fisher"], torch.arange(2))
    mix = torch.randn(form.rank, form.rank, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    same = truncate(form, mix, torch.linalg.inv(mix))
    torch.testing.assert_close(same.forward(x), form.forward(x), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("case", [name for name in ALL if not name.startswith(OWN_SOFTMAX)], indirect=True)
def test_simulation_equals_the_kernel_reference(case):
    anatomy, x, _ = case
    basis = bases(anatomy.kv_heads, anatomy.head_dim)["fisher"]
    form = latent_form(anatomy, basis, torch.tensor([0, 3]))
    latent, rope_key = form.compress(x)
    visible = causal_mask(x.shape[1], x.shape[1], anatomy.window, x.device)[None]
    gain = anatomy.project_key_gain(x)
    mixture, _ = shared_attention(form.queries(x), latent, rope_key, anatomy.scale, visible, gain)
    torch.testing.assert_close(torch.einsum("bthr,her->bthe", mixture, form.value_up), form.attend(x))


def test_latent_rows_compute_the_latent(checkpoints):
    opened = Source.open(checkpoints("llama"), ConvertSettings())
    anatomy = opened.anatomy(0).to(torch.float64)
    basis = bases(anatomy.kv_heads, anatomy.head_dim)["fisher"]
    rotated = torch.tensor([1, 5])
    x = torch.randn(1, 7, anatomy.hidden, dtype=torch.float64)
    projection = anatomy.project(x)
    z = torch.cat([projection.k.flatten(2), projection.v.flatten(2)], dim=-1)
    rows, dual = latent_rows(anatomy, basis, rotated), latent_rows(anatomy, basis, rotated, dual=True)
    torch.testing.assert_close(z @ rows.T, latent_form(anatomy, basis, rotated).compress(x)[0])
    torch.testing.assert_close(rows @ dual.T, torch.eye(len(rows), dtype=torch.float64))


def test_energies_of_latents_are_those_of_their_moments_whatever_keeps_its_rotation(checkpoints):
    anatomy = Source.open(checkpoints("llama"), ConvertSettings()).anatomy(0).to(torch.float64)
    groups, dim = anatomy.kv_heads, anatomy.head_dim
    keys, values = groups * dim, groups * anatomy.value_dim
    moment, metric = (random_moment(1, keys + values, seed)[0, :, 0] for seed in (3, 4))
    norms = torch.ones(anatomy.heads, dim // 2), torch.ones(groups, dim // 2)
    statistics, basis = LayerStatistics(moment, metric, *norms, 1), bases(groups, dim)["fisher"]
    choices = [torch.arange(0), torch.tensor([1, 5]), torch.arange(basis.components)]
    for rotated, energies in zip(choices, mla.latent_energies(anatomy, statistics, basis, choices), strict=True):
        rows, dual = (latent_rows(anatomy, basis, rotated, dual=dual) for dual in (False, True))
        root = left_root(damp(dual @ metric @ dual.T))
        torch.testing.assert_close(energies, torch.linalg.eigvalsh(root.T @ rows @ moment @ rows.T @ root).flip(0))
        assert len(energies) == keys + values - 2 * len(rotated)
