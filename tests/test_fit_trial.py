"""A layer-wise fit is kept where held-out text says that it helps, and given up where the model loses by it."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import surgery
from surgery.checkpoint.named_models import demo_model
from surgery.common.human import with_perplexity
from surgery.console.verdicts import of_conversion
from surgery.reporting.quality import fit_told
from surgery.structures import converter
from surgery.structures.fit_trial import FitTrial, TrialLosses
from surgery.structures.mla import structure
from surgery.structures.registry import TARGETS

TEXT = {"calibration_tokens": 256, "calibration_length": 64, "held_out": 2, "fit_steps": 1, "fit_iterations": 2}
ASKED = {
    "mla": {"kv_ratio": 0.5},
    "gqa": {"kv_heads": 1},
    "lowrank": {"kv_ratio": 0.5, "window": 8},
}


def report_of(source, out, to="mla", **others):
    settings = TARGETS[to].settings({**TEXT, **ASKED[to], **others})
    return converter.convert(source, out, settings).report.to_dict()


def losses_of(report):
    return {row["stage"]: row["loss"] for row in report["ladder"]}


@pytest.fixture
def fits(monkeypatch):
    """Has a function of its number and the closed form stand in for every fit; gives the dtypes they were asked in."""
    dtypes = []

    def replaced(fitted):
        def fit(start, inputs, targets, metric, effort, *, processes):
            dtypes.append(start.down.dtype)
            return fitted(len(dtypes) - 1, start), 1.0, 0.5

        monkeypatch.setattr(structure, "fit_latent_layer", fit)
        return dtypes

    return replaced


def spoiled(layer):
    return replace(layer, o=-layer.o)


def test_no_layer_is_fitted_further_where_the_model_loses_by_it(tmp_path, fits, monkeypatch):
    source = demo_model()  # of a random model no form is worse than another
    tried = fits(lambda number, start: spoiled(start))
    monkeypatch.setattr(FitTrial, "is_nearer", lambda *_: True)
    report = report_of(source, tmp_path / "given-up", rope_dim=8)
    assert len(tried) == 1 < report["source"]["layers"]
    fit = report["target"]["fit"]
    assert (fit["tried"], fit["kept"], fit["given_up"]["layers"]) == ([0], [], 1)
    assert fit["given_up"]["fitted"] > fit["given_up"]["closed"]
    assert "fitted" not in losses_of(report) and report["target"]["result"] == "truncated"
    assert "given up at layer 0" in of_conversion(report) and "--fit-steps" not in of_conversion(report)
    assert f"{with_perplexity(fit['given_up']['fitted'])} with layers fitted" in fit_told(fit)
    report_of(source, tmp_path / "closed", rope_dim=8, fit_steps=0)
    written, closed = (load_file(tmp_path / name / "model.safetensors") for name in ("given-up", "closed"))
    assert all(torch.equal(written[name], closed[name]) for name in closed)


def test_a_layer_keeps_its_closed_form_where_that_is_nearer_to_the_source(checkpoints, tmp_path, fits, monkeypatch):
    fits(lambda number, start: spoiled(start) if number == 1 else start)
    # Equal forms are no nearer; the first counts as a fit all the same.
    is_nearer = FitTrial.is_nearer
    seen = []

    def first_or_nearer(self, *forms):
        seen.append(is_nearer(self, *forms))
        return len(seen) == 1

    monkeypatch.setattr(FitTrial, "is_nearer", first_or_nearer)
    monkeypatch.setattr(FitTrial, "losses", lambda self, layers: TrialLosses(layers, 1.0, 2.0, 1.5, 0.6))
    report = report_of(checkpoints("llama"), tmp_path / "out")
    assert not any(seen) and report["target"]["fit"]["kept"] == [0]
    assert report["target"]["fit"]["tried"] == list(range(report["source"]["layers"]))
    losses = losses_of(report)
    assert losses["fitted"] == pytest.approx(losses["truncated"], abs=1e-4)
    assert "Fit kept by 1 of" in fit_told(report["target"]["fit"])


@pytest.mark.parametrize(
    ("fitted", "won", "half", "any_share"),
    [
        ([2.5, 1.5, 2.5, 1.5], 0.75, True, True),
        ([2.9, 1.1, 2.9, 1.1], 0.19, False, True),
        ([3.5, 0.5, 3.5, 0.5], -1.25, False, False),
        ([float("nan")] * 4, float("nan"), False, False),
    ],
)
def test_a_fit_has_to_win_back_a_share_of_what_closed_forms_move(fitted, won, half, any_share):
    source, closed = torch.full((4,), 2.0), torch.tensor([3.0, 1.0, 3.0, 1.0])  # no more loss, but other predictions
    found = TrialLosses.of(1, source, closed, torch.tensor(fitted))
    assert found.won == pytest.approx(won, nan_ok=True)
    for worth, goes_on in ((0.5, half), (0.0, any_share)):
        trial = FitTrial(None, None, None, "closed", ("fitted",), worth)
        assert trial.is_worth_it(found) == goes_on
        assert not trial.is_worth_it(TrialLosses.of(1, source, source, torch.tensor(fitted)))


def test_what_a_trial_asks_the_source_is_not_asked_again(checkpoints, tmp_path, monkeypatch):
    ahead, drop = [], FitTrial.drop
    monkeypatch.setattr(FitTrial, "drop", lambda self: (ahead.append(self.runs.ahead), drop(self)))
    for texts, want in ((5, (0, 0)), (7, (3, 7))):  # of five, one of the last four is looked at in every layer
        tried = report_of(checkpoints("llama"), tmp_path / f"{texts}", held_out=texts, fit_worth=1.0)
        closed = report_of(checkpoints("llama"), tmp_path / f"{texts}-closed", held_out=texts, fit_steps=0)
        assert ahead.pop() == want
        assert losses_of(tried)["source"] == pytest.approx(losses_of(closed)["source"], abs=1e-6)


@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.parametrize("to", ASKED)
def test_both_ends_in_every_structure(to, helps, checkpoints, tmp_path, monkeypatch):
    won = 0.6 if helps else 0.2
    monkeypatch.setattr(FitTrial, "losses", lambda self, layers: TrialLosses(layers, 1.0, 2.0, 1.5, won))
    report = report_of(checkpoints("llama"), tmp_path / "out", to)
    losses = losses_of(report)
    assert any("fitted" in stage for stage in losses) == helps
    assert losses["reloaded"] == pytest.approx(losses[report["target"]["result"]], abs=1e-4)
    assert (report["target"]["fit"]["given_up"] is None) == helps
    assert ("given up" in of_conversion(report)) != helps


def test_least_squares_run_in_float32_where_layers_run_in_less(checkpoints, tmp_path, fits):
    dtypes = fits(lambda number, start: start)
    report_of(checkpoints("llama", torch.bfloat16), tmp_path / "out", dtype="bfloat16")
    assert set(dtypes) == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kv_ratio", [0.25, 0.125])
def test_the_fit_never_loses_on_the_demo_model(kv_ratio, seed, tmp_path):
    report = surgery.convert("builtin", to="mla", kv_ratio=kv_ratio, seed=seed, out=tmp_path / "out").report
    losses = losses_of(report)
    assert report["target"]["result"] == "fitted" and losses["reloaded"] < losses["truncated"]
