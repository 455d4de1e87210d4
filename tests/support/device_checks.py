"""Calibration and healing on a device whose tensors have no values.

An operator that mixes this device with the CPU raises there, and so does one that reads a value to go on. The device is
a Python backend of torch, which a process keeps once it has it: each check runs in a process of its own.
"""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from processes import ROOT, Fork
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")
FAKE = "fake"


class WithoutValues(FakeTensorMode):
    """Mode in which a tensor of the CPU loses its values, too, when it moves."""

    avoid_device_init = True


def on_device(check: str) -> None:
    """Runs one of the functions below in a process of its own; skips where torch has no Python backends."""
    pytest.importorskip("torch", minversion="2.9")
    fork = Fork(check, code="import device_checks; device_checks.main()", path=(ROOT, Path(__file__).parent))
    assert fork.wait() == 0, fork.stderr[:3000]


def main() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from surgery.running import moment_precision
    from surgery.running.moment_precision import MomentPrecision

    _setup_privateuseone_for_python_backend(FAKE)
    device = torch.device(FAKE, 0)
    moment_precision.WITH_FLOAT64 = ("cpu", FAKE)
    MomentPrecision.of = classmethod(lambda cls, *args: cls(torch.float64, device, device))
    globals()[sys.argv[1]](device)


def sums_of_a_sweep(device: torch.device) -> None:
    """All sums of a layer stay on the device until the last batch, and what is held of tokens on the CPU."""
    from random_layers import random_layer

    from surgery.calibration import kronecker
    from surgery.calibration.statistics import MomentAccumulator
    from surgery.families.attention import CapturedAttention

    anatomy, x = random_layer()
    with WithoutValues(allow_non_fake_inputs=True):
        anatomy, x = anatomy.to(device), x.to(device)
        moments = MomentAccumulator(anatomy, gradients=True)

        for _ in range(2):
            captured = CapturedAttention(anatomy, gradients=True)
            out, _ = captured(x.clone().requires_grad_())
            out.square().sum().backward()
            moments.add(captured.projection, captured.inputs)
            moments.end_part()
        sums = {name: value for name, value in moments._total.items() if name != "tokens"}
        assert {(value.device, value.dtype) for value in sums.values()} == {(device, torch.float64)}
        assert all(batch.device == CPU for parts in moments._held.values() for part in parts for batch in part)

        rows = moments._held["rows"]
        weights = kronecker._unusual(rows, sums["moment"], device)
        assert {weight.device for weight in weights} == {CPU}
        moment = kronecker.weighted_moment(rows, weights, device=device)
        assert (moment.device, moment.dtype) == (device, torch.float64)
        assert kronecker.weighted_mean(rows, weights, device=device).device == CPU


def lags(device: torch.device) -> None:
    from random_layers import random_layer

    from surgery.calibration.statistics import lag_statistics
    from surgery.transforms.key_basis import identity_basis

    anatomy, x = random_layer()
    with WithoutValues(allow_non_fake_inputs=True):
        basis = identity_basis(anatomy.kv_heads, anatomy.head_dim // 2)
        result = lag_statistics(anatomy.to(device), basis, x)
        for sums, dtype in ((result.turned, torch.complex128), (result.energy, torch.float64)):
            assert (sums.device, sums.dtype, sums.shape) == (CPU, dtype, (basis.components, anatomy.heads))


def factorizations(device: torch.device) -> None:
    """Large matrices of the CPU go to the device, and what is made of them comes back."""
    from surgery.running.moment_precision import SMALLEST, factorizing_on, solver_of
    from surgery.transforms.algebra import eigh, eigvalsh, psd_powers, reduced_rank_projection

    with WithoutValues(allow_non_fake_inputs=True):
        large, small = (torch.eye(size, dtype=torch.float64) for size in (SMALLEST, 8))
        with factorizing_on(device):
            assert solver_of(large) == device and solver_of(small) == CPU
            solved = [*eigh(large), eigvalsh(large), *psd_powers(large, (0.5, -0.5))]
            solved += reduced_rank_projection(large, large, 4)
            assert {each.device for each in solved} == {CPU}
        assert solver_of(large) == CPU


def microbatches(device: torch.device) -> None:
    """Forward, losses and backward of all objectives, of a stock student and of one of the project's class."""
    from own_models import KINDS, tiny_source
    from training_data import packed_batch

    from surgery.training.distillation import Distillation
    from surgery.training.settings import LOSSES, ObjectiveWeights

    every = [part for part in LOSSES if part != "layerwise"]
    for kind, names in product(("source", "latent"), (every, ["layerwise"])):
        with torch.no_grad():
            teacher, student = tiny_source("llama"), tiny_source("llama")
            student = student if kind == "source" else KINDS[kind](student)
        weights, batch = ObjectiveWeights(**{"kl": 0.0, **dict.fromkeys(names, 1.0)}), packed_batch()
        module = Distillation(student, weights, teacher).train()  # transformers reads position ids on the host
        with WithoutValues(allow_non_fake_inputs=True):
            for each in (module, module._teacher[0].model):
                _to_fake(each, device)
            loss, parts = module(batch.to(device), float(batch.predicted))
            loss.backward()
            assert parts.keys() == set(names)
            assert {value.device for value in (loss, *parts.values())} == {device}
            assert any(each.grad is not None for each in student.parameters())


def _to_fake(model: nn.Module, device: torch.device) -> None:
    """Parameters and buffers on the device, in their places."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(device))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
