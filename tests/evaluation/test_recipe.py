"""Recipes: reading, refusals before anything runs, steps that are done already."""

import json

import pytest
import torch
import yaml
from tiny_models import HELD_OUT, make_checkpoint

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.structures.dry_run import plan_conversion
from surgery.structures.registry import TARGETS
from surgery.workflow.dry_run import plan_recipe
from surgery.workflow.recipe import Recipe, checked_recipe, run_recipe

pytestmark = pytest.mark.usefixtures("no_pictures")

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 1}
QUICK = {**TEXT, "rope_dim": 4}
MEASURED = {"tasks": ["loss"], "variants": "none", "windows": 2, "length": 64, "device": "cpu"}


def write(folder, *steps, **others):
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"steps": list(steps), **others}))
    return path


class Recorded(Progress):
    """Keeps the progress of each step."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def fresh(self):
        self.steps.append(super().fresh())
        return self.steps[-1]


@pytest.fixture(scope="module")
def steps():
    return []


@pytest.fixture(scope="module")
def finished(tmp_path_factory, steps):
    """A recipe of two steps, run: its path, its work folder and what resulted."""
    folder = tmp_path_factory.mktemp("recipe")
    source = make_checkpoint(folder / "source", "llama", torch.bfloat16)
    convert = {"name": "half", "source": str(source), "kv_ratio": 0.5, **QUICK}
    models = {"baseline": f"original={source}", "checkpoints": ["half"], "publish": str(folder / "published")}
    measured = {"name": "report", **models, **MEASURED, "decoded": 4}
    recipe = write(folder, {"convert": convert}, {"eval": measured}, name="two steps")
    return recipe, folder / "work", run_recipe(recipe, folder / "work", Recorded(steps))


def test_later_steps_use_earlier_ones_by_name_and_count_their_own_time(finished, steps):
    _, work, outcome = finished
    assert outcome.checkpoints == {"half": work / "half"}
    names = [(row["name"], row["role"], row["class"]) for row in outcome.report["rows"]]
    assert names == [("original", "baseline", "LlamaForCausalLM"), ("half", "checkpoint", "DeepseekV3ForCausalLM")]
    assert outcome.report["rows"][1]["conversion"]["to"] == "mla"
    assert outcome.report["rows"][1]["kv"]["ratio"] == pytest.approx(0.5, abs=0.05)
    assert len(steps) == 2 and {"calibrate: backward", "convert"} < set(steps[0].expected)


def test_reports_are_published(finished):
    _, work, outcome = finished
    published = work.parent / "published"
    assert {"report.json", "report.md"} <= {path.name for path in published.iterdir()}
    assert json.loads((published / "report.json").read_text()) == outcome.report
    assert not (published / "results").exists()


def test_finished_steps_are_kept(finished):
    recipe, work, outcome = finished
    before = (work / "half" / "surgery_report.json").stat().st_mtime_ns
    again = run_recipe(recipe, work, Progress(silent=True))
    assert (work / "half" / "surgery_report.json").stat().st_mtime_ns == before
    assert again.report["rows"] == outcome.report["rows"]


def test_outputs_of_other_settings_are_not_taken_for_them(finished, tmp_path):
    recipe, work, _ = finished
    steps = yaml.safe_load(recipe.read_text())["steps"]
    steps[0]["convert"]["seed"] = 7
    with pytest.raises(SurgeryError, match="half: exists, but from another source or with other settings"):
        run_recipe(write(tmp_path, *steps), work, Progress(silent=True))


STEP = {"convert": {"name": "a", "source": "builtin"}}
HEADS = {"heads": {"name": "p", "source": "builtin", "method": "needle"}}
HALF = {"convert": {"name": "half", "source": "builtin"}}
HYBRID = {"name": "h", "to": "hybrid"}
PLAN = {"plan": {"name": "chosen", "source": "builtin"}}
PLANNED = {"name": "a", "source": "builtin", "plan": "chosen"}


def sliced(source):
    return {"slice": {"name": "s", "source": source, "kv_ratio": 0.1}}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "no steps"),
        ([{"convrt": {"name": "a"}}], r"unknown command 'convrt'; did you mean convert\?"),
        ([{"convert": {"source": "builtin"}}], "step 1: name is missing"),
        ([{"convert": {"name": "../a", "source": "builtin"}}], "plain file name"),
        ([{"convert": None}], "convert is empty; add its settings"),
        (["convert"], "one command"),
        ([STEP, STEP], "duplicate step name a"),
        ([{"convert": {"name": "a"}}], "step a: source is missing"),
        ([{"convert": {"name": "a", "source": "x", "to": "gqx"}}], "unknown target"),
        ([STEP, {"eval": {"name": "r", "checkpoints": ["a"], "taks": ["loss"]}}], "did you mean tasks"),
        ([STEP, {"eval": {"name": "r", "checkpoints": "a"}}], "must be a list"),
        ([STEP, {"eval": {"name": "r"}}], "checkpoints is missing"),
        ([STEP, {"eval": {"name": "r", "checkpoints": ["b"]}}], "step r: b: no such folder"),
        ([STEP, {"eval": {"name": "r", "checkpoints": ["a"], "baseline": "x=nowhere"}}], "step r: nowhere: no such"),
        ([{"convert": {"name": "first", "source": "frst"}}], "step first: frst: no such folder"),
        ([HALF, sliced("halv")], r"step s: halv: neither an earlier step nor an existing folder; did you mean half\?"),
        ([sliced("a"), STEP], "step s: a is not an output of an earlier step; reorder the steps"),
        ([{"convert": {"name": "a", "source": "a"}}], "step a: a is not an output of an earlier step"),
        ([HEADS, sliced("p")], "p is a heads step, whose output cannot be used here"),
        ([{"convert": {**HYBRID, "source": "builtin", "heads": "p.x"}}], "p.x: no such pattern file"),
        ([HEADS, {"compare-heads": {"name": "c", "patterns": ["p"]}}], "compare-heads was removed"),
        ([{"convert": PLANNED}, PLAN], "chosen is not an output of an earlier step"),
        ([{"convert": {**PLANNED, "plan": "gone.yaml"}}], "gone.yaml: no such plan file"),
        ([PLAN, {"convert": {**PLANNED, "to": "mla"}}], "remove to"),
        ([PLAN, sliced("chosen")], "chosen is a plan step, whose output cannot be used here"),
        ([{"plan": {**PLAN["plan"], "kv_ration": 0.5}}], "did you mean kv_ratio"),
        ([{"heal": {"name": "h", "student": "gone", "teacher": "builtin"}}], "step h: gone: no such folder"),
        ([{"convert": {**STEP["convert"], "held_out": "few"}}], "step a: .*held_out must be a whole number"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path, steps, message):
    with pytest.raises(SurgeryError, match=message):
        run_recipe(write(tmp_path, *steps), tmp_path / "work", Progress(silent=True))
    assert not (tmp_path / "work").exists()


def test_unknown_entries_are_refused(tmp_path):
    with pytest.raises(SurgeryError, match="unknown entry 'nam'; did you mean name"):
        Recipe.read(write(tmp_path, STEP, nam="x"))


WEIGHTS = {"calibration": "none", "device": "cpu"}
LOW = {"to": "lowrank", "kv_ratio": 0.5, **WEIGHTS}
TRAINING = {"data": [{"source": str(HELD_OUT)}], "length": 32, "max_tokens": 640, "dtype": "fp32", "device": "cpu"}
TRAINING |= {"batch_size": 1, "gradient_accumulation": 1}


def test_a_dry_run_says_of_every_step_what_its_verb_says(finished, tmp_path):
    source, work = str(finished[0].parent / "source"), tmp_path / "work"
    path = write(
        tmp_path,
        {"convert": {"name": "low", "source": source, **LOW}},
        {"convert": {"name": "bits", "source": "low", "to": "hybrid", "streaming": 1.0, **WEIGHTS}},
        {"heal": {"name": "healed", "student": "low", "teacher": source, "measure": False, **TRAINING}},
        {"eval": {"name": "report", "baseline": source, "checkpoints": ["low", "bits", "healed"], **MEASURED}},
        {"slice": {"name": "sliced", "source": "low", "kv_ratio": 0.25, **WEIGHTS}},
        {"heads": {"name": "pattern", "source": source, "method": "needle"}},
        {"convert": {"name": "mixed", "source": source, "to": "hybrid", "heads": "pattern", **WEIGHTS}},
    )

    def planned():
        plan = plan_recipe(*checked_recipe(path), work, Progress(silent=True))
        return {step["name"]: step for step in plan["steps"]}, plan["total"]

    steps, total = planned()
    assert not work.exists()
    assert steps["sliced"]["note"] == "known after low" and steps["mixed"]["note"] == "known after pattern"
    assert "no dry run" in steps["pattern"]["note"] and "640 tokens" in steps["healed"]["note"]
    alone = plan_conversion(source, work / "low", TARGETS["lowrank"].settings({n: LOW[n] for n in LOW if n != "to"}))
    assert steps["low"]["disk"] == alone.disk["output_bytes"]
    assert steps["low"]["host"] == pytest.approx(alone.memory["host_bytes"], rel=0.2)  # with what this process holds
    messages = [step for step in steps.values() if step["host"]]
    assert [step["name"] for step in messages] == ["low", "bits", "healed", "report"]
    assert total["seconds"] == sum(step["seconds"] or 0 for step in messages) > steps["low"]["seconds"] > 0
    assert total["host"] == max(step["host"] for step in messages)
    assert steps["healed"]["temporary"] > 0
    assert total["disk"] == sum(steps[name]["disk"] for name in ("low", "bits", "healed"))

    # What is forecast from shapes alone is what is forecast once the checkpoint is there.
    run_recipe(
        write(tmp_path / "first", {"convert": {"name": "low", "source": source, **LOW}}), work, Progress(silent=True)
    )
    after, _ = planned()
    assert after["low"]["exists"] and after["low"]["host"] is None and after["sliced"]["host"] > 0
    assert [after[name]["host"] for name in ("healed", "report")] == [
        steps[name]["host"] for name in ("healed", "report")
    ]
    others = [file for file in (work / "low").rglob("*") if file.is_file() and file.suffix != ".safetensors"]
    more = after["bits"]["disk"] - steps["bits"]["disk"]  # a report and a card, which shapes do not forecast
    assert 0 <= more <= sum(file.stat().st_size for file in others)


def test_a_dry_run_refuses_what_a_step_would_refuse(finished, tmp_path):
    source = str(finished[0].parent / "source")
    path = write(tmp_path, {"slice": {"name": "sliced", "source": source, "kv_ratio": 0.25, **WEIGHTS}})
    with pytest.raises(SurgeryError, match="slice") as planned:
        plan_recipe(*checked_recipe(path), tmp_path / "work", Progress(silent=True))
    few = {"windows": 1, "length": 32, "tasks": ["loss"], "data": ["builtin", str(HELD_OUT)], "device": "cpu"}
    measured = write(tmp_path / "eval", {"eval": {"name": "report", "checkpoints": [source], **few}})
    with pytest.raises(SurgeryError) as run:
        run_recipe(measured, tmp_path / "eval" / "work", Progress(silent=True))
    for error, where in ((planned, f"{path}, step sliced: "), (run, f"{measured}, step report: ")):
        assert str(error.value).startswith(where) and str(error.value).count("step ") == 1


def test_a_conversion_carries_out_the_plan_before_it(checkpoints, tmp_path):
    source = str(checkpoints("llama"))
    settings = {"kv_ratio": 0.5, "allow": ["lowrank", "quantized"], "context": "64"}
    settings |= {**TEXT, "held_out": 2, "recall": 0.0}
    recipe = write(
        tmp_path,
        {"plan": {"name": "chosen", "source": source, **settings}},
        {"convert": {"name": "small", "source": source, "plan": "chosen", "held_out": 1}},
    )
    finished = run_recipe(recipe, tmp_path / "work", Progress(silent=True))
    document = yaml.safe_load((tmp_path / "work" / "chosen.yaml").read_text())
    report = json.loads((finished.checkpoints["small"] / "surgery_report.json").read_text())
    assert report["target"]["to"] == document["to"] and report["target"]["predicted"] == document["predicted"]
    assert report["settings"]["held_out"] == 1  # a conversion's own settings win
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "work").glob("*.yaml"))]
    run_recipe(recipe, tmp_path / "work", Progress(silent=True))
    assert before == [path.stat().st_mtime_ns for path in sorted((tmp_path / "work").glob("*.yaml"))]
    other = write(tmp_path, {"plan": {"name": "chosen", "source": source, **settings, "kv_ratio": 0.25}})
    with pytest.raises(SurgeryError, match=r"chosen\.yaml: exists, but from another source or with other settings"):
        run_recipe(other, tmp_path / "work", Progress(silent=True))
