"""A model that reads values in bits is never written worse than it was."""

import pytest
import torch
from healing import heal_here, heal_settings, log_of
from safetensors.torch import load_file
from tiny_models import HELD_OUT

from surgery.structures.mla.settings import ConvertSettings

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 512, "calibration_length": 64, "held_out": 1, "recall": 0.0}


@pytest.mark.parametrize("rate", [1.0, 1e-5])
def test_the_state_of_least_divergence_is_written(rate, conversions, checkpoints, tmp_path):
    student = conversions("llama", ConvertSettings(**TEXT, bits="auto", kv_ratio=0.1, batch_size=4)).path
    values = heal_settings(tmp_path, student, checkpoints("llama"), max_steps=3, eval_every=1, learning_rate=rate)
    held_out = heal_here(values)["held_out"]
    measured = {line["step"]: line["kl"] for line in log_of(values, "held_out")}
    assert set(measured) == {0, 1, 2, 3} and held_out["written"] == "best"
    assert held_out["best_step"] == min(measured, key=measured.get) and held_out["best_kl"] == min(measured.values())
    before, after = (load_file(folder / "model.safetensors") for folder in (student, tmp_path / "healed"))
    same = all(torch.equal(before[name], after[name]) for name in before)
    assert same == (held_out["best_step"] == 0) and (same or rate < 1)
