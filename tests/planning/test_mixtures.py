"""Mixtures in plans: their costs add up to what was measured, what they lose is what the written model loses."""

import itertools
import json
import random

import pytest
import torch
import yaml
from decoded_losses import decoded
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.calibration.texts import load_texts
from surgery.common.progress import Progress
from surgery.eval.kv_cache import cache_bytes
from surgery.heads.pattern import HeadPattern
from surgery.planning.candidates import Candidates
from surgery.planning.cost import Cost
from surgery.planning.measure import carry, measure
from surgery.planning.mixing import Mixer
from surgery.planning.mixture import Mixture
from surgery.planning.plan import make_plan, opened_work
from surgery.planning.plan_file import read_plan, write_plan
from surgery.planning.rows import alike
from surgery.planning.settings import PlanSettings
from surgery.running.source import Source
from surgery.structures import converter
from surgery.structures.registry import MIXED, find_target
from surgery.transforms.allocation import Frontier

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 4, "recall": 0.0}
CONTEXT = {"context": "64", "batch": 2}
QUIET = Progress(silent=True)
ASKED = {
    "lowrank": {"kv_ratio": 0.4, "bits": "auto", "sinks": 3, "group": 16},
    "quantized": {"bits": 4, "sinks": 3, "group": 16},
    "gqa": {"kv_heads": 1},
    "hybrid": {"streaming": 0.5, "bits": 4, "group": 16},
}


@pytest.fixture
def made(checkpoints, tmp_path):
    """Source, settings, texts, work and sized candidates."""
    heads = tmp_path / "pattern.safetensors"
    HeadPattern(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), "needle", 3, 20).save(heads)
    asked = {**ASKED, "hybrid": {**ASKED["hybrid"], "heads": str(heads)}}
    settings = PlanSettings(**{**TEXT, "held_out": CONTEXT["batch"]}, **CONTEXT)
    opened = Source.open(checkpoints("llama_bias"), settings)
    texts = load_texts(opened, settings, QUIET, planted=False)
    with opened_work(opened, settings, texts, QUIET) as work:
        candidates = Candidates(opened, work, settings)
        sized = [candidates.sized(find_target(to), each, None) for to, each in asked.items()]
        yield opened, settings, texts, work, candidates, sized


@pytest.mark.parametrize("pair", [(0, 2), (None, 0), (3, 1), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_a_mixture_loses_what_the_written_model_loses_as_it_decodes(made, tmp_path, pair):
    opened, settings, texts, work, candidates, sized = made
    line = [None if place is None else candidates.part(sized[place]) for place in pair]
    (scored,) = carry([line], work, texts.held_out).scored
    mixture = Mixture.of(line, opened, settings)
    asked = {**settings.common(), **mixture.asked, "fit_steps": 0}
    written = converter.convert(opened.reader.source, tmp_path / "out", MIXED.settings(asked))
    losses, cache = decoded(
        AutoModelForCausalLM.from_pretrained(written.path).eval(), texts.held_out.tokens[: texts.held_out.texts]
    )
    assert scored.losses == pytest.approx(losses.tolist(), abs=2e-5)
    assert mixture.kv_bytes == cache_bytes(cache)


def test_what_begins_alike_goes_one_way_and_scores_as_if_alone(made):
    *_, texts, work, _, sized = made
    lines = [[None, sized[0]], [None, None], [sized[0], sized[0]], [sized[0], None]]
    together = carry(lines, work, texts.held_out)
    assert together.scored[1] == together.source
    for line, scored in zip(lines, together.scored, strict=True):
        assert carry([line], work, texts.held_out).scored[0].losses == pytest.approx(scored.losses, abs=1e-12)


def test_costs_of_layers_add_up_to_what_was_measured(made):
    _, settings, texts, work, candidates, sized = made
    carried = measure(sized, work, texts.held_out, weighs=True)
    mixer = Mixer(candidates, sized, carried, work, texts.held_out, settings)
    cost = Cost(carried.source)
    for exponent in (1.0, 0.5):
        sums = mixer._dealt(exponent).sum(1)
        assert sums[:-1].tolist() == pytest.approx([cost(scored) for scored in carried.scored]) and not sums[-1]


def test_the_frontier_is_the_best_of_all_choices():
    random.seed(0)
    options = [[(random.randint(1, 9), random.random()) for _ in range(4)] for _ in range(5)]
    everything = [(sum(o[0] for o in each), sum(o[1] for o in each)) for each in itertools.product(*options)]
    frontier = Frontier(options, 45)
    for size in (5, 12, 20, 45):
        found, fitting = frontier.within(size), [cost for held, cost in everything if held <= size]
        if found is None:
            assert not fitting
            continue
        picked = [of_layer[place] for of_layer, place in zip(options, found, strict=True)]
        assert sum(held for held, _ in picked) <= size
        assert sum(cost for _, cost in picked) == pytest.approx(min(fitting))
    least = frontier.for_cost(2.0)
    picked = [of_layer[place] for of_layer, place in zip(options, least, strict=True)]
    assert sum(held for held, _ in picked) == min(held for held, cost in everything if cost <= 2.0)


# Of a random model the seed decides whether a mixture is among those that are tried.
@pytest.mark.parametrize("budget", [{"kv_ratio": 0.4}, {"max_loss": 0.5, "seed": 1}])
def test_a_plan_with_mixtures_is_no_worse_deterministic_and_carried_out(checkpoints, tmp_path, budget):
    source = checkpoints("llama")
    asked = {"allow": ("lowrank", "gqa", "quantized", "bits"), **budget, **TEXT, **CONTEXT}
    alone, plan, again = (
        make_plan(source, PlanSettings(mixtures=count, **asked), called="ckpt") for count in (0, 6, 6)
    )
    assert not any(row.to == "mixed" for row in alone.rows)
    assert [(row.asked, row.cost) for row in plan.rows] == [(row.asked, row.cost) for row in again.rows]
    assert {str(row.asked) for row in alone.rows} <= {str(row.asked) for row in plan.rows}
    assert plan.source["loss"] != alone.source["loss"]  # rows are of texts that no mixture was looked for on
    single = [row for row in plan.rows if row.to != "mixed"]
    if "kv_ratio" in budget:
        level = [plan.rows[place] for place in alike(plan.rows, budget["kv_ratio"])]
        best = min((row for row in single if row.kv_ratio <= budget["kv_ratio"]), key=lambda row: row.cost)
        assert plan.chosen is level[0] and (best in level or plan.chosen.cost < best.cost)
    else:
        assert plan.chosen.kv_bytes <= min(row.kv_bytes for row in single if row.loss_increase <= budget["max_loss"])
    place = next(place for place, row in enumerate(plan.rows) if row.to == "mixed")
    object.__setattr__(plan, "choice", place)
    write_plan(plan, tmp_path / "plan.yaml")
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["to"] == "mixed"
    planned = read_plan(tmp_path / "plan.yaml")
    settings = planned.target.settings({**planned.settings, "fit_steps": 0})
    path = converter.convert(source, tmp_path / "out", settings, predicted=planned.predicted).path
    assert (
        json.loads((path / "surgery_report.json").read_text())["settings"]["parts"] == plan.rows[place].asked["parts"]
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        held = model(torch.arange(64)[None].repeat(2, 1) % model.config.vocab_size).past_key_values
    assert cache_bytes(held) == plan.rows[place].kv_bytes
