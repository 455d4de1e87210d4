"""liger-kernel's losses against our own, under Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import divergences
import pytest
import torch
from torch import nn

from surgery.common.errors import SurgeryError
from surgery.training import liger
from surgery.training.chunks import States

torch.set_num_threads(1)

COMPARISON = """
import os
import torch
from torch import nn
from surgery.training import liger
from surgery.training.chunks import States
from surgery.training.objectives import ObjectiveWeights, combine, logit_losses

device = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
torch.manual_seed(0)
hidden = torch.randn(11, 8, device=device, requires_grad=True)
student = States(hidden, nn.Linear(8, 37, bias=False, device=device).requires_grad_(False))
teacher = States(torch.randn(11, 6, device=device), nn.Linear(6, 37, bias=False, device=device).requires_grad_(False))
targets = torch.randint(0, 37, (11,), device=device)
weights = ObjectiveWeights(kl=1, reverse_kl=1, jsd=1, jsd_beta=0.3, temperature=1.7, cross_entropy=1)
assert liger.fits(student) and liger.fits(teacher)
calls = []
divergence, liger.divergence = liger.divergence, lambda *args: calls.append(1) or divergence(*args)
results = []
for use in (False, True):
    parts = logit_losses(weights, student, teacher, targets, chunks=3, positions=7, liger=use)
    results.append((parts, torch.autograd.grad(combine(weights, parts)[0], hidden)))
assert len(calls) == 9
torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
"""


def test_equals_ours():
    pytest.importorskip("liger_kernel")
    # The interpreter is chosen when Triton is imported.
    environment = os.environ if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", COMPARISON], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_fits_plain_frozen_heads_only(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    head, hidden = nn.Linear(4, 7, bias=False).requires_grad_(False), torch.randn(3, 4)
    assert liger.fits(States(hidden, head)) and liger.fits(States(hidden, head.weight))
    assert not liger.fits(States(hidden, nn.Linear(4, 7, bias=False)))
    assert not liger.fits(States(hidden, nn.Linear(4, 7).requires_grad_(False)))
    assert not liger.fits(States(hidden.bfloat16(), head))
    assert not liger.fits(States(hidden, nn.Sequential(head)))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not liger.fits(States(hidden, head))
    head.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not liger.fits(States(hidden, head))


def test_missing_package_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    states = States(torch.randn(3, 4), nn.Linear(4, 7))
    with pytest.raises(SurgeryError, match="pip install liger-kernel"):
        divergences.forward_kl(states, states, liger=True)
