import numpy as np
import pytest

from surgery.eval.report.document import able_average
from surgery.eval.tasks.loss import _memorised


def ruler(**scores):
    return {"lengths": {"1024": {"tasks": {task: {"score": score} for task, score in scores.items()}}}}


def test_only_what_the_baseline_can_do_counts():
    source, row = ruler(vt=0.5, cwe=0.1, qa_1=0.3), ruler(vt=0.25, cwe=0.9, qa_1=0.05)
    assert able_average(row, source, 0.3) == {"average": 0.15, "tasks": 2, "of": 3}
    assert able_average(source, source, 0.6) is None and able_average(row, None, 0.3) is None


def test_losses_with_and_without_what_is_known_by_heart():
    losses, baseline = np.array([[1.0, 3.0, 5.0], [2.0, 2.0, 2.0]]), np.array([[0.05, 3.0, 5.0], [0.0, 0.01, 2.0]])
    found = _memorised(losses, baseline)
    assert found["share"] == 0.5 and found["loss"] == pytest.approx(5 / 3)
    assert found["loss_of_others"] == pytest.approx(10 / 3) == np.mean(found["per_sequence"])
    assert _memorised(losses, np.zeros_like(losses))["per_sequence"] is None
