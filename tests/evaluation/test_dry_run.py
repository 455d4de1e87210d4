"""A dry run of an evaluation says beforehand what the evaluation then does and writes."""

import json

import pytest
import torch
from command_line import listing, run_main
from conversions import convert_checkpoint
from tiny_models import HELD_OUT, make_checkpoint

from surgery.common.progress import Progress
from surgery.evaluation.dry_run import plan_evaluation
from surgery.evaluation.run import EvaluationRequest, evaluate
from surgery.evaluation.settings import EvalSettings
from surgery.structures.registry import TARGETS

pytestmark = pytest.mark.usefixtures("no_pictures")

SMALL = {"windows": 3, "length": 96, "decoded": 4, "recall_prompts": 3, "batch_size": 2, "device": "cpu"}
SMALL |= {"new_tokens": 3, "prompts": ["def", "def", "def"], "contexts": "24,32", "batches": "1,2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A source in bfloat16, and what it was converted to: the custom class with a quantized cache, and stock MLA."""
    folder = tmp_path_factory.mktemp("plan")
    source = make_checkpoint(folder / "source", "llama", torch.bfloat16, 0)
    settings = {"calibration": "none", "device": "cpu", "kv_ratio": 0.5}
    text = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 1}
    codes = TARGETS["lowrank"].settings({**settings, **text, "kv_ratio": 0.3, "bits": "auto"})
    convert_checkpoint(source, folder / "codes", codes)
    convert_checkpoint(source, folder / "mla", TARGETS["mla"].settings({**settings, "rope_dim": 4}))
    return folder


def request(*checkpoints, out, baseline=None, **settings):
    return EvaluationRequest(tuple(map(str, checkpoints)), baseline, out, EvalSettings(**{**SMALL, **settings}))


def plan(*checkpoints, out, **settings):
    return plan_evaluation(request(*checkpoints, out=out, **settings), Progress(silent=True))


def test_bytes_are_those_of_the_evaluation(folder, tmp_path):
    names = ["codes", "mla"]
    settings = {"baseline": str(folder / "source"), "tasks": "loss", "variants": "window"}
    settings |= {"decoded": 0, "length": 32}
    models = [folder / name for name in names]
    forecast = plan(*models, out=tmp_path / "out", **settings)
    report = evaluate(request(*models, out=tmp_path / "out", **settings), Progress(silent=True)).report
    rows = [row for row in report["rows"] if row["role"] != "variant"]
    assert [row["name"] for row in forecast.rows] == ["source", *names] == [row["name"] for row in rows]
    assert [row["kv"] for row in forecast.rows] == [row["kv"]["held_bytes"] for row in rows]
    assert forecast.variants == [row["name"] for row in report["rows"] if row["role"] == "variant"]
    source, stored = forecast.rows[0], (folder / "source" / "model.safetensors").stat().st_size
    assert source["weights"] == pytest.approx(2 * stored, rel=2e-2)  # quality is measured in float32
    assert source["cache"] == 2 * 2 * source["kv"]  # and two windows at a time


def test_kv_bytes_may_be_counted_at_another_context_than_windows_have(folder, tmp_path):
    plans = {
        context: plan(folder / "source", out=tmp_path / "out", tasks="loss", length=32, kv_context=context)
        for context in (None, 16)
    }
    lengths = {context: (each.settings["context"], each.settings["length"]) for context, each in plans.items()}
    assert lengths == {None: (32, 32), 16: (16, 32)}
    rows = {context: each.rows[0] for context, each in plans.items()}
    assert rows[16]["kv"] == rows[None]["kv"] / 2 and rows[16]["cache"] == rows[None]["cache"]


def test_the_screen_says_what_and_where_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = ["--tasks", "loss", "--windows", "3", "--length", "80", "--device", "cuda", "--variants", "int8"]
    verb = ["eval", f"small={folder / 'mla'}", "--baseline", folder / "source", *quick, "--dry-run"]
    code, output, _ = run_main(monkeypatch, capsys, *verb)
    assert code == 0 and not listing(tmp_path)
    for message in ("dry run: small-eval", "source", "int8 KV", "3 windows of 80 tokens", "on cuda", "small-eval/"):
        assert message in output
    assert "2 windows of 80 tokens" in run_main(monkeypatch, capsys, *verb, "--limit", "2")[1]
    code, output, _ = run_main(monkeypatch, capsys, *verb, "--json")
    assert code == 0 and json.loads(output)["tasks"] == ["kv", "loss"]
    (tmp_path / "small-eval").mkdir()
    (tmp_path / "small-eval" / "notes.txt").write_text("mine")
    code, _, errors = run_main(monkeypatch, capsys, *verb)
    assert code == 1 and "contains files other than an evaluation" in errors
