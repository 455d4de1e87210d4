"""Cascades: groups of layers and refusals; `test_convert_quantized.py` has the conversions to packed rows."""

import json

import pytest
from conversions import convert_checkpoint
from tiny_models import SHORT_TEXT

from surgery.checkpoint.file_kinds import REPORT
from surgery.common.errors import SurgeryError
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.cross_layer.structure import earlier_layers

QUICK = {**SHORT_TEXT, "batch_size": 2, "group_size": 2, "kv_ratio": 0.15}


def test_groups_end_at_their_size_and_at_unchanged_layers():
    assert earlier_layers(7, 3, frozenset()) == (0, 1, 2, 0, 1, 2, 0)
    assert earlier_layers(7, 3, frozenset({1, 6})) == (0, 0, 0, 1, 2, 0, 0)
    with pytest.raises(SurgeryError, match="no converted layers are adjacent"):
        earlier_layers(4, 2, frozenset({1, 3}))


def test_groups_are_larger_at_few_bytes():
    assert CrossLayerSettings().layers_per_group == CrossLayerSettings(kv_ratio=0.1).layers_per_group == 3
    assert CrossLayerSettings(kv_ratio=0.0625).layers_per_group == 6
    assert CrossLayerSettings(kv_ratio=0.0625, group_size=4).layers_per_group == 4


def test_report_and_card_are_written(conversions):
    result = conversions("qwen2", CrossLayerSettings(**QUICK))
    target = json.loads((result.path / REPORT).read_text())["target"]
    assert (target["method"], target["bits"], target["shared_layers"]) == ("cascade", "auto", [0, 1])
    assert "latents" in (result.path / "README.md").read_text()


def test_converted_checkpoints_are_refused(conversions, tmp_path):
    source = conversions("qwen2", CrossLayerSettings(**QUICK)).path
    with pytest.raises(SurgeryError, match="convert its source"):
        convert_checkpoint(source, tmp_path / "out", CrossLayerSettings(**QUICK))


@pytest.mark.parametrize(
    ("name", "settings", "setting"),
    [
        ("mistral_window", {}, "bits"),
        ("llama", {"kv_ratio": 0.001}, "kv_ratio"),
        ("llama", {"group_size": 1}, "group_size"),
        ("llama", {"calibration": "none"}, "calibration"),
    ],
)
def test_impossible_requests_leave_nothing(checkpoints, tmp_path, name, settings, setting):
    with pytest.raises(SurgeryError) as error:
        convert_checkpoint(checkpoints(name), tmp_path / "out", CrossLayerSettings(**{**QUICK, **settings}))
    assert error.value.setting == setting and list(tmp_path.iterdir()) == []
