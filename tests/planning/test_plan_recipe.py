"""A plan as a step of a recipe: what it chooses is what the conversion after it makes."""

import json

import pytest
import yaml
from tiny_models import HELD_OUT

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.workflow.recipe import run_recipe

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 2, "recall": 0.0}
QUIET = Progress(silent=True)


def write(folder, *steps):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"steps": list(steps)}))
    return path


def test_a_conversion_carries_out_the_plan_before_it(checkpoints, tmp_path):
    source = str(checkpoints("llama"))
    settings = {"kv_ratio": 0.5, "allow": ["lowrank", "quantized"], "context": "64", **TEXT}
    recipe = write(
        tmp_path,
        {"plan": {"name": "chosen", "source": source, **settings}},
        {"convert": {"name": "small", "source": source, "plan": "chosen", "held_out": 1}},
    )
    finished = run_recipe(recipe, tmp_path / "work", QUIET)
    document = yaml.safe_load((tmp_path / "work" / "chosen.yaml").read_text())
    report = json.loads((finished.checkpoints["small"] / "surgery_report.json").read_text())
    assert report["target"]["to"] == document["to"] and report["target"]["predicted"] == document["predicted"]
    assert report["settings"]["held_out"] == 1  # a conversion's own settings win
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "work").glob("*.yaml"))]
    run_recipe(recipe, tmp_path / "work", QUIET)
    assert before == [path.stat().st_mtime_ns for path in sorted((tmp_path / "work").glob("*.yaml"))]
    other = write(tmp_path, {"plan": {"name": "chosen", "source": source, **settings, "kv_ratio": 0.25}})
    with pytest.raises(SurgeryError, match=r"chosen\.yaml: exists, but from another source or with other settings"):
        run_recipe(other, tmp_path / "work", QUIET)


PLAN = {"plan": {"name": "chosen", "source": "builtin"}}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [{"convert": {"name": "a", "source": "builtin", "plan": "chosen"}}, PLAN],
            "chosen is not an output of an earlier step",
        ),
        ([{"convert": {"name": "a", "source": "builtin", "plan": "gone.yaml"}}], "gone.yaml: no such plan file"),
        ([PLAN, {"convert": {"name": "a", "source": "builtin", "plan": "chosen", "to": "mla"}}], "remove to"),
        (
            [PLAN, {"convert": {"name": "a", "source": "chosen"}}],
            "chosen is a plan step, whose output cannot be used here",
        ),
        ([{"plan": {"name": "chosen", "source": "builtin", "kv_ration": 0.5}}], "did you mean kv_ratio"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path, steps, message):
    with pytest.raises(SurgeryError, match=message):
        run_recipe(write(tmp_path, *steps), tmp_path / "work", QUIET)
    assert not (tmp_path / "work").exists()
