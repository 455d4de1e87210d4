"""Statistics that are kept give the same conversion, and are not taken for those of anything else."""

import json
from dataclasses import replace

import pytest
import torch
from conversions import convert_checkpoint
from safetensors.torch import load_file

from surgery.calibration import layer_statistics
from surgery.calibration.texts import load_texts
from surgery.checkpoint.snapshots import Snapshots
from surgery.common.progress import Progress
from surgery.running.source import Source
from surgery.structures.context import ConversionContext
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings

QUICK = {"calibration": "builtin", "calibration_tokens": 96, "calibration_length": 48, "held_out": 2}


class Told(Progress):
    def __init__(self):
        super().__init__(silent=True)
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_the_same_bits_from_statistics_that_were_kept(checkpoints, tmp_path, monkeypatch):
    """Statistics of an MLA conversion, which have lags, serve low rank too: the same moments."""
    source, entries = checkpoints("llama"), str(tmp_path / "kept")
    mla, low_rank = ConvertSettings(**QUICK, carrier="own"), LowRankSettings(**QUICK)
    plain = [convert_checkpoint(source, tmp_path / f"plain-{n}", each) for n, each in enumerate((mla, low_rank))]
    convert_checkpoint(source, tmp_path / "first", replace(mla, keep_statistics=entries))
    (folder,) = (tmp_path / "kept").iterdir()
    for path in folder.glob("*.pt"):  # as of an earlier version, which saved more
        stored = torch.load(path)
        torch.save(stored | {"statistics": stored["statistics"] | {"query_energy": torch.ones(2)}}, path)
    monkeypatch.setattr(layer_statistics, "backward_sweep", lambda *_, **__: pytest.fail("taken again"))
    for number, settings in enumerate((mla, low_rank)):
        message = Told()
        request = replace(settings, keep_statistics=entries)
        second = convert_checkpoint(source, tmp_path / f"second-{number}", request, progress=message)
        assert any("statistics: loaded from" in note for note in message.notes)
        one, two = (load_file(result.path / "model.safetensors") for result in (plain[number], second))
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert json.loads((folder / "facts.json").read_text())["gradients"] is True


def test_other_facts_are_other_statistics(checkpoints, tmp_path):
    settings = LowRankSettings(**QUICK, keep_statistics=str(tmp_path / "kept"))
    entries = 0
    for change in ({}, {"seed": 1}, {"batch_size": 2}, {"calibration_tokens": 48}, {"dtype": "float64"}, {}):
        message, changed = Told(), replace(settings, **change)
        opened = Source.open(checkpoints("llama"), changed)
        texts = load_texts(opened, changed, message)
        work = ConversionContext.in_folder(Snapshots(), opened, changed, texts, message)
        with work.library, work.store:
            work.gather()
        known = any("statistics: loaded from" in note for note in message.notes)
        entries += not known
        assert len(list((tmp_path / "kept").iterdir())) == entries, change
        assert known == (entries == 5 and not change), change
