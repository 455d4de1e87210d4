"""Evaluations on the way: the numbers of `surgery eval`, and a training that does not notice them."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from healing import heal_here, heal_settings, log_of, losses_of, settings_file, stopped_after
from processes import torchrun
from safetensors.torch import load_file
from tiny_models import DEMO

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.tasks.recall import RECALL_SEED
from surgery.evaluation.run import EvaluationRequest, evaluate
from surgery.evaluation.settings import EvalSettings
from surgery.training import evaluations, loop
from surgery.training.evaluations import same_random_numbers, scalars
from surgery.training.guards import Interrupted
from surgery.training.settings import HealSettings

EVALUATED = {"evaluate_every": 2, "evaluate_limit": 2, "length": 96, "max_steps": 3}


def settings_in(folder: Path, student: Path, teacher: Path, **others) -> dict:
    """Settings of a short run that is evaluated on its own text."""
    own = {"evaluate_data": [str(folder / "text.txt")]}
    return heal_settings(folder, student, teacher, **{**EVALUATED, **own, **others})


@pytest.fixture
def settings(tmp_path, student, teacher):
    return lambda **others: settings_in(tmp_path, student, teacher, **others)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, student, teacher) -> tuple[dict, dict]:
    """Settings of a run, and what it says of its evaluations."""
    values = settings_in(tmp_path_factory.mktemp("measured"), student, teacher)
    return values, heal_here(values)


def same_weights(one: dict, two: dict) -> bool:
    first, second = (load_file(Path(values["out"]) / "model.safetensors") for values in (one, two))
    return all(torch.equal(each, second[name]) for name, each in first.items())


def test_what_surgery_eval_has_by_default():
    settings = EvalSettings()
    ours = evaluations
    assert (settings.windows, settings.decoded, settings.recall_prompts) == (ours.WINDOWS, ours.DECODED, ours.PROMPTS)
    assert (settings.seed, RECALL_SEED) == (ours.SEED, ours.RECALL_SEED)


@pytest.mark.usefixtures("short_decoding")
def test_the_numbers_are_those_of_surgery_eval(settings, tmp_path):
    values = settings(evaluate_data=[], max_steps=2)
    facts = heal_here(values)
    assert [entry["step"] for entry in facts["evaluations"]] == [0, 2]
    expected = EvalSettings(tasks=("loss", "recall"), length=96, limit=2, batch_size=2, variants=(), device="cpu")
    report = evaluate(
        EvaluationRequest((values["out"],), None, tmp_path / "report", expected), Progress(silent=True)
    ).report
    results, last = report["rows"][0]["results"], facts["evaluations"][-1]
    assert last["loss"]["loss"] == pytest.approx(results["loss"]["loss"], rel=1e-6)
    assert last["loss"]["cached_loss"] == pytest.approx(results["loss"]["cached"]["decoded_loss"], rel=1e-6)
    assert last["recall"] == {"accuracy": results["recall"]["accuracy"]}
    for name, arguments in facts["evaluation_settings"].items():  # a report tells the modules of the text apart
        assert {**arguments, "sources": None} == {**report["tasks"][name], "sources": None}
    assert facts["evaluations"][0]["loss"]["loss"] != last["loss"]["loss"]
    logged = log_of(values, "evaluation")
    assert [{name: value for name, value in line.items() if name != "event"} for line in logged] == facts["evaluations"]


def test_recall_is_that_of_the_student_as_it_is(tmp_path):
    """The demo model recalls, and after a step that destroys it no longer."""
    values = heal_settings(tmp_path, DEMO, None, length=256, max_steps=1, held_out=0, evaluate_every=1, batch_size=1)
    values |= {"evaluate_tasks": ["recall"], "evaluate_limit": 4, "gradient_accumulation": 1}
    values |= {"learning_rate": 1.0, "schedule": "constant", "warmup": 0}
    before, after = (entry["recall"]["accuracy"] for entry in heal_here(values)["evaluations"])
    assert before >= 0.5 > after == 0


@pytest.mark.parametrize(
    "others",
    [
        {},
        *(
            pytest.param(slow, marks=pytest.mark.slow)
            for slow in ({"dtype": "bf16", "train": "lora"}, {"compile": True})
        ),
    ],
    ids=["fp32", "bf16", "compiled"],
)
def test_a_training_does_not_notice(settings, measured, others):
    without, evaluated = settings(name="without", evaluate_every=None, **others), measured[0]
    heal_here(without)
    if others:
        evaluated = settings(name="measured", **others)
        heal_here(evaluated)
    assert len(log_of(evaluated, "evaluation")) == 3 and not log_of(without, "evaluation")
    assert losses_of(evaluated) == losses_of(without)
    assert same_weights(evaluated, without)


def test_a_resumed_run_has_the_same_evaluations(settings, measured):
    (whole, facts), parts = measured, settings(name="parts", save_every=None)
    with stopped_after(2), pytest.raises(Interrupted):
        heal_here(parts)
    resumed = heal_here(parts)
    assert [entry["step"] for entry in resumed["evaluations"]] == [0, 2, 3]
    assert resumed["evaluations"] == facts["evaluations"]
    assert losses_of(parts) == losses_of(whole) and same_weights(parts, whole)


def test_measuring_takes_nothing_of_the_budgets_seconds(settings, monkeypatch):
    now = [0.0]
    real = evaluations.Evaluations.measure

    def slow(self, *arguments):
        now[0] += 1000.0
        return real(self, *arguments)

    monkeypatch.setattr(evaluations.Evaluations, "measure", slow)

    def tick():
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(loop.time, "monotonic", tick)
    facts = heal_here(settings(max_seconds=500.0, evaluate_tasks=["recall"]))
    assert (facts["ended"], facts["steps"]) == ("max_steps reached", 3) and facts["seconds"] < 1
    assert facts["measuring_seconds"] == pytest.approx(3000.0, abs=1)


def test_random_numbers_stay(monkeypatch):
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def states():
        random.seed(3), np.random.seed(3), torch.manual_seed(3)

    states()
    expected = draw()
    states()
    with same_random_numbers(torch.device("cpu")):
        draw()
    assert draw() == expected


def test_refusals(settings):
    with pytest.raises(SurgeryError, match="did you mean recall"):
        HealSettings(**settings(evaluate_tasks=["recal"]))
    with pytest.raises(SurgeryError, match="evaluate_tasks is empty"):
        HealSettings(**settings(evaluate_tasks=[]))
    with pytest.raises(SurgeryError, match="evaluate_every must be at least 1"):
        HealSettings(**settings(evaluate_every=0))
    with pytest.raises(SurgeryError, match="evaluate_tasks: "):
        heal_here(settings(length=32))  # no room for planted facts


def test_own_texts_and_the_numbers_that_a_tracker_takes(measured):
    assert measured[1]["evaluation_settings"]["loss"]["sources"] == ["text.txt"]
    assert scalars({"loss": {"loss": 2.0}, "recall": {"accuracy": 0.5}}) == {"loss/loss": 2.0, "recall/accuracy": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["gloo", "fsdp2"])
def test_two_processes_measure_what_one_does(settings, launch):
    one, two = settings(name="one"), settings(name="two", gradient_accumulation=1)
    script = {"gloo": ["-m", "surgery.training.heal", "--config"], "fsdp2": [Path(__file__).with_name("test_fsdp2.py")]}
    result = torchrun(*script[launch], settings_file(two))
    assert result.returncode == 0, result.stderr[-3000:]
    facts = heal_here(one)["evaluations"]
    shared = json.loads((Path(two["out"]) / "heal.json").read_text())["evaluations"]
    assert [entry["step"] for entry in shared] == [0, 2, 3]
    for mine, theirs in zip(facts, shared, strict=True):
        assert theirs["recall"] == mine["recall"]
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-4)
