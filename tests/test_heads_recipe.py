"""Recipes that score heads and let heads stream by them."""

import json

import pytest
import yaml
from command_line import listing
from tiny_models import HELD_OUT, make_checkpoint

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.heads.pattern import HeadPattern
from surgery.workflow.recipe import run_recipe

pytestmark = pytest.mark.usefixtures("one_core")

SCORE = {"sinks": 4, "recent": 16, "length": 200, "samples": 1, "facts": 1, "text": str(HELD_OUT), "device": "cpu"}


def write(folder, *steps):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"steps": list(steps)}))
    return path


def steps_of(recipe):
    return yaml.safe_load(recipe.read_text())["steps"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A recipe that ran: its path and its work folder."""
    folder = tmp_path_factory.mktemp("recipe")
    source = str(make_checkpoint(folder / "source", "llama"))
    recipe = write(
        folder,
        {"heads": {"name": "trained", "source": source, "method": "duo", "steps": 4, **SCORE}},
        {"heads": {"name": "induced", "source": source, "method": "induction", **SCORE}},
        {
            "convert": {
                "name": "hybrid", "to": "hybrid", "source": source, "heads": "trained", "streaming": 0.5,
                "calibration": "none",
            }
        },
    )  # fmt: skip
    run_recipe(recipe, folder / "work", Progress(silent=True))
    return recipe, folder / "work"


def times(work):
    return {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}


def test_later_steps_use_patterns_by_name(finished):
    _, work = finished
    patterns = {name: HeadPattern.load(work / f"{name}.safetensors") for name in ("trained", "induced")}
    assert {name: pattern.method for name, pattern in patterns.items()} == {
        "trained": "duo",
        "induced": "induction",
    }
    report = json.loads((work / "hybrid" / "surgery_report.json").read_text())
    assert report["target"]["pattern"]["sha256"] == patterns["trained"].sha256
    full = patterns["trained"].full_heads(0.5)
    assert [layer["full_heads"] for layer in report["layers"]] == [row.nonzero().flatten().tolist() for row in full]
    assert not [name for name in listing(work) if "partial" in name]


def test_finished_steps_are_kept(finished):
    recipe, work = finished
    before = times(work)
    outcome = run_recipe(recipe, work, Progress(silent=True))
    assert times(work) == before
    assert outcome.patterns == {name: work / f"{name}.safetensors" for name in ("trained", "induced")}


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"samples": 2}, {"length": 100}, {"method": "needle"}, {"source": "other"}], ids=str
)
def test_patterns_of_other_models_and_settings_are_not_taken_for_them(finished, tmp_path, change):
    recipe, work = finished
    if "source" in change:
        change = {"source": str(make_checkpoint(tmp_path / "other", "llama", seed=1))}
    steps = steps_of(recipe)
    steps[0]["heads"].update(change)
    with pytest.raises(SurgeryError, match=r"trained\.safetensors: was made from another model or with other settings"):
        run_recipe(write(tmp_path, *steps), work, Progress(silent=True))


def test_a_conversion_by_an_older_pattern_is_not_kept(finished, tmp_path):
    recipe, work = finished
    pattern = HeadPattern.load(work / "trained.safetensors")
    steps = [{"convert": {**steps_of(recipe)[2]["convert"], "heads": str(tmp_path / "mine.safetensors")}}]
    pattern.save(tmp_path / "mine.safetensors")
    mine = write(tmp_path, *steps)
    run_recipe(mine, tmp_path / "work", Progress(silent=True))
    before = times(tmp_path / "work")
    run_recipe(mine, tmp_path / "work", Progress(silent=True))
    assert times(tmp_path / "work") == before
    HeadPattern(-pattern.scores, "duo", 4, 16).save(tmp_path / "mine.safetensors", overwrite=True)
    with pytest.raises(SurgeryError, match="hybrid: exists, but from another source or with other settings"):
        run_recipe(mine, tmp_path / "work", Progress(silent=True))


HEADS = {"heads": {"name": "a", "source": "builtin"}}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"heads": {"name": "a"}}], "step a: source is missing"),
        ([{"heads": {**HEADS["heads"], "sink": 4}}], "did you mean sinks"),
        ([{"heads": {**HEADS["heads"], "method": "magic"}}], "'magic' is unknown"),
        ([HEADS, {"convert": {"name": "h", "source": "builtin", "to": "hybrid", "haeds": "a"}}], "did you mean heads"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path, steps, message):
    with pytest.raises(SurgeryError, match=message):
        run_recipe(write(tmp_path, *steps), tmp_path / "work", Progress(silent=True))
    assert not (tmp_path / "work").exists()
