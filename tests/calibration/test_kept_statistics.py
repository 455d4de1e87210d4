"""Statistics that are kept give the same conversion, and are not taken for those of anything else."""

import json
from dataclasses import replace

import pytest
import torch
from conversions import convert_checkpoint
from safetensors.torch import load_file

from surgery.calibration import layer_statistics
from surgery.common.progress import Progress
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings

QUICK = {"calibration": "builtin", "calibration_tokens": 96, "calibration_length": 48, "held_out": 2}


class Told(Progress):
    def __init__(self):
        super().__init__(silent=True)
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize(
    ("convert", "settings"),
    [(convert_checkpoint, LowRankSettings(**QUICK)), (convert_checkpoint, ConvertSettings(**QUICK))],
)
def test_the_same_bits_from_statistics_that_were_kept(checkpoints, tmp_path, monkeypatch, convert, settings):
    source = checkpoints("llama")
    plain = convert(source, tmp_path / "plain", settings)
    settings = replace(settings, keep_statistics=str(tmp_path / "kept"))
    convert(source, tmp_path / "first", settings)
    monkeypatch.setattr(layer_statistics, "backward_sweep", lambda *_, **__: pytest.fail("taken again"))
    told = Told()
    second = convert(source, tmp_path / "second", settings, progress=told)
    assert any("those kept in" in note for note in told.notes)
    for name, tensor in load_file(plain.path / "model.safetensors").items():
        assert torch.equal(tensor, load_file(second.path / "model.safetensors")[name]), name
    (folder,) = (tmp_path / "kept").iterdir()
    assert json.loads((folder / "facts.json").read_text())["gradients"] is True


def test_other_facts_are_other_statistics(checkpoints, tmp_path):
    settings = LowRankSettings(**QUICK, keep_statistics=str(tmp_path / "kept"))
    changes = ({}, {"seed": 1}, {"batch_size": 2}, {"calibration_tokens": 48}, {"dtype": "float64"})
    for number, change in enumerate(changes):
        told = Told()
        convert_checkpoint(checkpoints("llama"), tmp_path / str(number), replace(settings, **change), progress=told)
        assert not any("those kept in" in note for note in told.notes), change
        assert len(list((tmp_path / "kept").iterdir())) == number + 1, change


def test_statistics_with_lags_serve_where_none_are_asked_for(checkpoints, tmp_path):
    """As an MLA conversion or a plan keeps them, for low rank: the same moments."""
    source, kept = checkpoints("llama"), str(tmp_path / "kept")
    quick = QUICK
    plain = convert_checkpoint(source, tmp_path / "plain", LowRankSettings(**quick))
    convert_checkpoint(source, tmp_path / "mla", ConvertSettings(**quick, keep_statistics=kept))
    told = Told()
    settings = LowRankSettings(**quick, keep_statistics=kept)
    second = convert_checkpoint(source, tmp_path / "second", settings, progress=told)
    assert any("those kept in" in note for note in told.notes)
    one, two = (load_file(made.path / "model.safetensors") for made in (plain, second))
    assert all(torch.equal(one[name], two[name]) for name in one)
