"""The picture of a pattern."""

import pytest
import torch

from surgery.common.errors import SurgeryError
from surgery.heads.heat_map import head_map, save_head_map
from surgery.heads.pattern import HeadPattern

PATTERN = HeadPattern(torch.tensor([[0.9, 0.1, 0.8, 0.2], [0.0, 0.3, 0.1, 0.4]]), "a $x$", 0, 1)


def test_heat_map(tmp_path):
    panel = head_map(PATTERN).axes[0]
    assert panel.get_title(loc="left") == r"a \$x\$"  # no mathematics
    output, scores = panel.collections[0].get_array().reshape(2, 4), PATTERN.scores.numpy()
    assert output.data == pytest.approx((scores - scores.min()) / (scores.max() - scores.min()))
    assert panel.get_title(loc="right") == "0 to 0.9"
    assert [(round(box.get_y() + 0.44), round(box.get_x() + 0.44)) for box in panel.patches] == [(0, 0), (0, 2)]
    path = save_head_map(tmp_path / "map.png", PATTERN)
    assert path.read_bytes() == save_head_map(tmp_path / "again.png", PATTERN).read_bytes()
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SurgeryError, match="cannot write"):
        save_head_map(tmp_path / "nowhere" / "map.png", PATTERN)


def test_heat_map_of_equal_scores():
    panel = head_map(HeadPattern(torch.ones(2, 2), "flat")).axes[0]
    assert panel.collections[0].get_array().ravel().tolist() == [0, 0, 0, 0]
