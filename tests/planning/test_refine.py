"""`--refine`: gates find the better candidate, keep to the bytes, and are heard only where held-out loss falls."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import HELD_OUT

from surgery.calibration.held_out import HeldOut
from surgery.calibration.texts import STRETCH, further_text, load_texts
from surgery.checkpoint import snapshots
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.console.planning import show_plan_of_budget
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.planning import refine as refining
from surgery.planning.candidates import Candidates
from surgery.planning.gates import GatedModel, within
from surgery.planning.measure import Carried, Scored
from surgery.planning.mixture import Mixture
from surgery.planning.plan import make_plan, opened_work
from surgery.planning.plan_file import read_plan, write_plan
from surgery.planning.refine import Refinement, ladder
from surgery.planning.settings import PlanSettings
from surgery.running.source import Source
from surgery.structures import converter
from surgery.structures.registry import find_target
from surgery.transforms.quantized_reading import as_quantized

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 4, "recall": 0.0}
CONTEXT = {"context": "64", "batch": 2}
QUIET = Progress(silent=True)
LOWRANK, IDLE = find_target("lowrank"), 1


@pytest.fixture(scope="module")
def idle(checkpoints, tmp_path_factory):
    """A checkpoint of a family whose second layer attends for nothing: nothing reads what comes of it."""

    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp("idle") / family
        shutil.copytree(checkpoints(family), folder)
        weights = load_file(folder / "model.safetensors")
        weights[f"model.layers.{IDLE}.self_attn.o_proj.weight"].zero_()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return made


@pytest.fixture
def opened_plan(request, idle):
    """Work, candidates and settings of a source with an idle layer."""
    settings = PlanSettings(**TEXT, **CONTEXT)
    opened = Source.open(idle(request.param), settings)
    texts = load_texts(opened, settings, QUIET, planted=False)
    with opened_work(opened, settings, texts, QUIET) as work:
        yield work, Candidates(opened, work, settings), settings, texts


def sizes_of(line, work, settings):
    """Bytes of every layer."""
    return [refining.layer_bytes(item.config, work.opened, settings)[layer] for layer, item in enumerate(line)]


@pytest.mark.parametrize("opened_plan", ["llama", "qwen3"], indirect=True)
def test_gates_give_an_idle_layers_bytes_to_the_others(opened_plan, tmp_path, monkeypatch):
    work, candidates, settings, texts = opened_plan
    alike = {"kv_ratio": 0.36, "allocate": "uniform"}  # water-filling gives an idle layer next to nothing by itself
    choice, other = (candidates.sized(LOWRANK, {**alike, **more}, None) for more in ({}, {"bits": 2}))
    options = ladder(choice, [other], candidates, 2)
    assert options[0] is choice and options[-1] is other and len(options) == 6
    tokens = further_text(work.opened, settings, texts.held_out, 40 * 64, QUIET)
    made = Refinement(options, work, settings, choice.kv_bytes)
    ends, passed, gradients, cheapest = [], [], GatedModel.gradients, Refinement._cheapest
    monkeypatch.setattr(Refinement, "_cheapest", lambda self, costs: ends.append(costs) or cheapest(self, costs))
    line = made.learned(tokens)
    sizes, before = sizes_of(line, work, settings), sizes_of([choice, choice], work, settings)
    assert sizes[IDLE] < before[IDLE] and sizes[0] > before[0] and line[0] is not other
    assert Mixture.of(line, work.opened, settings).kv_bytes <= choice.kv_bytes

    # Once more, by the same seed, killed in the middle: it goes on to the same end.
    def killed(self, *args):
        passed.append(args)
        if len(passed) == len(tokens) // 2:
            raise KeyboardInterrupt
        return gradients(self, *args)

    monkeypatch.setattr(snapshots, "INTERVAL", 0.0)
    monkeypatch.setattr(GatedModel, "gradients", killed)
    object.__setattr__(work, "snapshots", snapshots.Snapshots(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        made.learned(tokens)
    assert made.learned(tokens) == line
    assert torch.equal(*ends) and len(passed) == len(tokens) + 1


def test_expected_bytes_are_the_budget():
    torch.manual_seed(0)
    scores, sizes = torch.randn(3, 4).double(), torch.rand(3, 4).double()
    free = float((scores.softmax(-1) * sizes).sum())
    for budget in (1.01 * float(sizes.min(1).values.sum()), 0.9 * free, 1.1 * free):
        chances = within(scores, sizes, budget).exp()
        assert float((chances * sizes).sum()) == pytest.approx(min(budget, free))
        assert chances.sum(-1).tolist() == pytest.approx([1.0] * 3)
    level = scores - within(scores, sizes, 0.9 * free)  # a price of size, and what makes the sum 1
    slopes = (level[:, 1:] - level[:, :1]) / (sizes[:, 1:] - sizes[:, :1])
    assert slopes.flatten().tolist() == pytest.approx([float(slopes[0, 0])] * 9)


@pytest.mark.parametrize("opened_plan", ["llama"], indirect=True)
@pytest.mark.parametrize("share", [0.36, 0.5, 0.93])
def test_what_is_rounded_keeps_to_the_bytes_whatever_gates_say(opened_plan, share):
    work, candidates, settings, _ = opened_plan
    options = [candidates.sized(LOWRANK, {"kv_ratio": ratio}, None) for ratio in (0.25, 0.5, 0.75)]
    held = share * candidates.source_bytes
    made = Refinement(options, work, settings, held)
    assert made.can_learn and (None in made._options) == (share > 0.6)  # a layer as it is, where one fits
    for seed in range(5):
        torch.manual_seed(seed)
        line = made._cheapest(torch.randn(made._sizes.shape).double())
        assert Mixture.of(line, work.opened, settings).kv_bytes <= held
    assert not Refinement(options, work, settings, held / 9).can_learn  # nothing fits


def test_further_text_has_nothing_of_what_is_held_out(checkpoints):
    settings = PlanSettings(**TEXT, **CONTEXT)
    opened = Source.open(checkpoints("llama"), settings)
    held_out = load_texts(opened, settings, QUIET, planted=False).held_out
    found = further_text(opened, settings, held_out, 40 * 64, QUIET)
    assert found.shape == (40, 64)
    # Sequences that begin or end with text of others, as windows that overlap do.
    overlap = torch.cat([found[:2, STRETCH:], found[2:4, :STRETCH]], dim=1)
    left = further_text(opened, settings, HeldOut.of_text(overlap), 40 * 64, QUIET)
    assert torch.equal(left, found[4:])
    with pytest.raises(SurgeryError, match="no text beside what is held out"):
        further_text(opened, settings, HeldOut.of_text(found), 40 * 64, QUIET)


def test_gradients_pass_what_is_rounded():
    keys = torch.randn(1, 1, 16, 8, requires_grad=True)
    cache = QuantizedKVLayer("int2", 8)
    read, values = as_quantized(cache, keys, keys[..., :0])
    assert torch.allclose(read, as_quantized(cache, keys.detach(), keys.detach()[..., :0])[0])
    (read * torch.arange(8.0)).sum().backward()
    assert torch.equal(keys.grad, torch.arange(8.0).expand_as(keys)) and values.shape[-1] == 0


ASKED = {"kv_ratio": 0.4, "allow": ("lowrank", "gqa"), "refine": "1k", **TEXT, **CONTEXT}


def carried(monkeypatch, before, after):
    """Has comparisons find these losses on four texts, and this divergence, of the choice and of what was refined."""
    scored = [Scored([1.0 + more for more in losses], None, None, divergence) for losses, divergence in (before, after)]
    source = Scored([1.0] * 4, None, None)
    monkeypatch.setattr(refining, "carry", lambda lines, work, held_out: Carried(source, scored, []))


def test_a_refined_plan_that_loses_less_is_the_choice_and_is_carried_out(checkpoints, tmp_path, monkeypatch):
    carried(monkeypatch, ([0.2, 0.21, 0.2, 0.21], 0.02), ([0.1, 0.11, 0.1, 0.11], 0.01))
    plan = make_plan(checkpoints("llama"), PlanSettings(**ASKED), called="ckpt")
    refined, chosen = plan.refined, plan.chosen
    assert refined.kept and (refined.tokens, refined.seed) == (1024, 0)
    assert refined.told == "refined on 1,024 tokens: +0.1050 nats for +0.2050 on 4 texts, kept"
    assert chosen.to == "mixed" and chosen.loss_increase == pytest.approx(0.105) and chosen.kv_ratio <= 0.4
    assert json.loads(json.dumps(plan.to_dict()))["refined"]["kept"]
    show_plan_of_budget(plan, tmp_path / "plan.yaml", None)
    write_plan(plan, tmp_path / "plan.yaml")
    planned = read_plan(tmp_path / "plan.yaml")
    settings = planned.target.settings({**planned.settings, "fit_steps": 0})
    path = converter.convert(checkpoints("llama"), tmp_path / "out", settings, predicted=planned.predicted).path
    assert json.loads((path / "surgery_report.json").read_text())["settings"]["parts"] == chosen.asked["parts"]


def test_a_refined_plan_that_loses_more_is_not_kept(checkpoints, monkeypatch):
    alone, asked = PlanSettings(**{**ASKED, "refine": 0}), PlanSettings(**ASKED)
    alone = make_plan(checkpoints("llama"), alone, called="ckpt")
    assert alone.refined is None
    level = [0.2, 0.21, 0.2, 0.21]
    # More loss, though predictions moved less; and less loss, which texts cannot tell, where they moved more.
    for other in (([0.201, 0.211, 0.201, 0.21], 0.0), ([0.1, 0.3, 0.1, 0.3], 0.03)):
        carried(monkeypatch, (level, 0.02), other)
        plan = make_plan(checkpoints("llama"), asked, called="ckpt")
        assert not plan.refined.kept and plan.refined.told.endswith("not kept")
        assert plan.rows == alone.rows and plan.choice == alone.choice
    monkeypatch.setattr(refining, "ladder", lambda choice, *others: [])
    plan = make_plan(checkpoints("llama"), asked, called="ckpt")
    assert plan.rows == alone.rows and plan.refined.told.startswith("nothing to refine")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"refine": "much"}, "refine 'much' is no number of tokens"),
        ({"refine": "1k", "max_loss": 0.1}, "give kv_ratio"),
    ],
)
def test_what_cannot_be_refined_is_one_line(asked, message):
    with pytest.raises(SurgeryError, match=message):
        PlanSettings.from_mapping(asked, "plan")


def test_a_model_that_does_not_fit_in_memory_is_refused_first(checkpoints, monkeypatch):
    monkeypatch.setattr(refining.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(SurgeryError, match=r"refine holds the whole model in memory, .* and .* are free"):
        make_plan(checkpoints("llama"), PlanSettings(**ASKED))
