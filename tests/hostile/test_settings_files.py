"""Recipes, settings and plans that nobody meant well with: taken as what they say, or refused in one line."""

from pathlib import Path

import pytest
import yaml
from hostile import cases, damaged, mutated, taken_or_refused
from hypothesis import example, given
from hypothesis import strategies as st

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import read_mapping
from surgery.evaluation.settings import EvalSettings
from surgery.heads.settings import HeadSettings
from surgery.planning.plan_file import read_plan
from surgery.planning.settings import PlanSettings
from surgery.structures.registry import SLICE, TARGETS
from surgery.training.settings import HealSettings
from surgery.workflow.names import check_names
from surgery.workflow.recipe import COMMANDS, Recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = {
    "name": "all",
    "steps": [
        {"convert": {"source": "builtin", "name": "half", "to": "mla", "kv_ratio": 0.5, "calibration": "none"}},
        {"slice": {"source": "half", "name": "sliced", "kv_ratio": 0.25}},
        {"heads": {"source": "builtin", "name": "scores", "method": "induction", "seeds": 2}},
        {"heal": {"student": "half", "teacher": "builtin", "name": "healed", "max_steps": 2, "measure": {"limit": 2}}},
        {"eval": {"name": "report", "baseline": "builtin", "checkpoints": ["a=half"], "tasks": ["loss"], "limit": 3}},
    ],
}
PLAN = {
    "to": "lowrank",
    "settings": {"calibration": "builtin", "calibration_tokens": 2048, "seed": 0, "kv_ratio": 0.25},
    "predicted": {"loss_increase": 0.01, "low": 0.0, "high": 0.1, "recall": None, "kv_bytes": 512, "kv_ratio": 0.25}
    | {"context": 1024, "batch": 1},
}
BOMB = (
    "a: &a ["
    + "x, " * 9
    + "x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    )
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
CLASSES = {"eval": EvalSettings, "heads": HeadSettings, "heal": HealSettings, "plan": PlanSettings}
CLASSES |= {target.name: target.settings_class for target in (*TARGETS.values(), SLICE)}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "file.yaml"


def checked(path):
    """Run all checks of a recipe before its first step."""
    recipe = Recipe.read(path)
    for step in recipe.steps:
        COMMANDS[step.command](step, f"{path}, step {step.name}")
    check_names(path, recipe.steps)
    return recipe


def test_the_recipe_and_the_plan_without_changes_are_taken(file):
    file.write_text(yaml.safe_dump(RECIPE))
    assert len(checked(file).steps) == 5
    file.write_text(yaml.safe_dump(PLAN))
    planned = read_plan(file)
    assert planned.target.name == PLAN["to"] and planned.target.settings(dict(planned.settings))


@given(mutated(RECIPE))
@example({"steps": [{"slice": {"source": "a" * 5000, "name": "sliced", "kv_ratio": 0.25}}]})
@example({"steps": [{"convert": {"source": "builtin", "name": "h", "to": "hybrid", "heads": "a\0"}}]})
@example({"steps": [{"eval": {"name": "report", "baseline": "b=" + "a" * 5000, "checkpoints": []}}]})
@cases(20)
def test_recipes(file, recipe):
    file.write_text(yaml.safe_dump(recipe, allow_unicode=True), errors="replace")
    taken_or_refused(lambda: checked(file))


@given(mutated(PLAN))
@cases(15)
def test_plans(file, plan):
    file.write_text(yaml.safe_dump(plan), errors="replace")

    def settings():
        planned = read_plan(file)
        loss, recall = (planned.predicted.get(name) for name in ("loss_increase", "recall"))
        assert f"{loss:+.4f}" and (recall is None or f"{recall:.2f}")  # as reports show them
        return planned.target.settings(dict(planned.settings))

    taken_or_refused(settings)


@given(st.data())
@cases(20)
def test_settings(file, data):
    name = data.draw(st.sampled_from(sorted(CLASSES)))
    defaults = (
        {key: list(value) if isinstance(value, tuple) else value for key, value in CLASSES[name]().to_dict().items()}
        if name not in ("heal", "slice")
        else {}
    )
    file.write_text(yaml.safe_dump(data.draw(mutated(defaults))), errors="replace")
    taken_or_refused(lambda: CLASSES[name].from_file(file))


@given(damaged((ROOT / "recipes" / "testbed-structures.yaml").read_bytes(), head=2000) | st.binary(max_size=64))
@cases(7)
@example(b"!!python/object/apply:os.system ['touch /tmp/ran']")
@example(b"a: 2001-99-99")
@example(b"a: !!int x")
@example(b"a: !!timestamp x")
@example(b"a: 0x_")
@example(b"a: " + b"9" * 5000)
@example(b"a: &a [*a]")
@example(b"&a {? *a : 1}")
@example(b"[" * 2000)
@example(b"a: !!binary ====")
@example(b"? [x]\n: 1")
@example(BOMB.encode())
@example(MERGES.encode())
def test_bytes(file, content):
    file.write_bytes(content)
    taken_or_refused(lambda: checked(file))


@pytest.mark.parametrize("bomb", [BOMB, MERGES, "a: &a [*a]"])
def test_bombs_are_refused(bomb, file):
    file.write_text(bomb)
    with pytest.raises(SurgeryError, match="aliases expand to more than"):
        read_mapping(file)
