"""Moments on a device: the same numbers however they are taken, no mixture of devices, nothing that waits."""

from dataclasses import fields

import pytest
import torch
from device_checks import on_device
from no_host_sync import NoHostSync
from random_layers import random_layer

from surgery.calibration import kronecker, statistics
from surgery.calibration.kronecker import weighted_mean, weighted_moment
from surgery.calibration.statistics import MomentAccumulator, lag_statistics
from surgery.families.attention import CapturedAttention
from surgery.running import layer_stream, moment_precision
from surgery.running.moment_precision import CPU, MomentPrecision
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.key_basis import identity_basis

CUDA = torch.device("cuda", 0)


def add_batch(moments, anatomy, x):
    """One microbatch of the backward sweep."""
    captured = CapturedAttention(anatomy, gradients=True)
    out, _ = captured(x.clone().requires_grad_())
    out.square().sum().backward()
    moments.add(captured.projection, captured.inputs)


def moments_of(anatomy, x):
    moments = MomentAccumulator(anatomy, gradients=True)
    for batch in x.split(1):
        add_batch(moments, anatomy, batch)
    return moments.result()


def tensors_of(result):
    return {each.name: getattr(result, each.name) for each in fields(result) if each.name != "tokens"}


@pytest.mark.parametrize(
    ("capability", "free", "expected"),
    [
        ((9, 0), 2**30, (torch.float64, CUDA, CUDA)),
        ((8, 9), 2**30, (torch.float32, CUDA, CPU)),  # slow float64: sums are additions alone
        ((9, 0), 2**10, (torch.float64, CPU, CPU)),  # no room
    ],
)
def test_the_choice_of_a_cuda_device(monkeypatch, capability, free, expected):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(moment_precision, "_free_bytes", lambda device: free)
    assert MomentPrecision.of(CUDA, 2**20) == MomentPrecision(*expected)


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_elsewhere_sums_are_on_the_cpu(device):
    assert MomentPrecision.of(device) == MomentPrecision(torch.float32, CPU, CPU)


def test_wider_products_change_a_moment_by_float32_rounding(monkeypatch):
    """Sum as a GPU with fast float64 does. Weights of tokens take the rounding through an inverse."""
    anatomy, x = random_layer()
    plain, exact = moments_of(anatomy, x), moments_of(*random_layer(torch.float64))
    wide = MomentPrecision(products=torch.float64)
    for module in (statistics, kronecker):
        monkeypatch.setattr(module.MomentPrecision, "of", classmethod(lambda cls, *args: wide))
    widened = moments_of(anatomy, x)
    for name, value in tensors_of(exact).items():
        for result in (plain, widened):
            error = (getattr(result, name).double() - value).norm() / value.norm()
            assert error < (1e-5 if "weight" in name else 2e-6), (name, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_together_are_heads_one_by_one(monkeypatch, dtype):
    anatomy, x = random_layer(dtype)
    basis = identity_basis(anatomy.kv_heads, anatomy.head_dim // 2)
    alone = lag_statistics(anatomy, basis, x)
    monkeypatch.setattr(statistics, "_together", lambda heads, *_: [slice(0, 3), slice(3, 6), slice(6, heads)])
    together = lag_statistics(anatomy, basis, x)
    options = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(together.turned, alone.turned, **options)
    torch.testing.assert_close(together.energy, alone.energy, **options)


def test_a_microbatch_of_the_sweep_does_not_wait():
    anatomy, x = random_layer()
    moments = MomentAccumulator(anatomy, gradients=True)
    rows, weights = [[x[0]], [x[1]]], [torch.ones(20, dtype=torch.float64)] * 2
    with NoHostSync(strict=False):
        add_batch(moments, anatomy, x)
        statistics._causal_product(torch.rand(3, 20, 20), torch.rand(20, 4))
        weighted_moment(rows, weights)
        weighted_mean(rows, weights)
    assert moments.result().is_finite()


@pytest.mark.parametrize("check", ["sums_of_a_sweep", "lags", "factorizations"])
def test_on_a_device_without_values(check):
    on_device(check)


def test_losses_of_tokens_do_not_wait(checkpoints, monkeypatch):
    """Over a vocabulary in slices, of which a token's own is one."""
    monkeypatch.setattr(layer_stream, "VOCABULARY_SLICE", 1000)
    stream = Source.open(checkpoints("llama"), ConvertSettings()).stream
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4096, (2, 12), generator=generator)
    hidden = torch.randn(2, 12, stream.config.hidden_size, generator=generator)
    slices = list(stream.output_slices())  # read from the file on the CPU
    monkeypatch.setattr(stream, "output_slices", lambda: slices)
    with NoHostSync(strict=False):
        losses = stream.token_losses(hidden, tokens)
    expected = torch.nn.functional.cross_entropy(
        stream.logits(hidden)[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
