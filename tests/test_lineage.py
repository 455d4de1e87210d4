"""A conversion, its healings and its evaluations are filed together where they are followed."""

import re

from conversions import convert_checkpoint

from surgery.common.lineage import lineage_of
from surgery.evaluation.models import Checkpoint
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.training.settings import HealSettings
from surgery.training.trackers import _wandb_options


def test_one_group(checkpoints, tmp_path):
    out = tmp_path / "small"
    convert_checkpoint(checkpoints("llama"), out, KVHeadsSettings(kv_heads=1, calibration="none", device="cpu"))
    group = lineage_of(out)
    assert re.fullmatch(r"mqa-[0-9a-f]{8}", group)  # what one KV head is called
    assert Checkpoint.open(str(out)).conversion()["lineage"] == group
    settings = HealSettings(student=str(out), tracker="wandb", wandb_mode="offline")
    healing = _wandb_options(settings, tmp_path / "small-healed.tracking")
    assert (healing["group"], healing["name"]) == (group, "small-healed")
    assert lineage_of(checkpoints("llama")) is None
