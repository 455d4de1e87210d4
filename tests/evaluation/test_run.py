"""The command as a whole, on tiny random models: rows, resuming, refusals."""

import json
import shutil
import sys

import pytest
import torch
from conversions import convert_checkpoint
from tiny_models import DEMO, make_checkpoint

from surgery.calibration.held_out_documents import default_names
from surgery.common import plugins, wandb_service
from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry
from surgery.common.progress import Progress
from surgery.eval.tasks.loss import LossTask
from surgery.evaluation import run as runs
from surgery.evaluation.dry_run import plan_evaluation
from surgery.evaluation.output import write_report
from surgery.evaluation.run import EvaluationRequest, evaluate
from surgery.evaluation.settings import EvalSettings
from surgery.evaluation.store import ResultStore
from surgery.structures.mla.settings import ConvertSettings

SMALL = {"windows": 3, "length": 40, "decoded": 4, "recall_prompts": 2, "batch_size": 2, "device": "cpu"}

CHEAP = {"tasks": "loss,generate", "new_tokens": 3, "variants": "int8,window,fp8,oscar_int2"}


def run(checkpoints, baseline, out, *, overwrite=False, restart=False, **settings):
    models = tuple(map(str, checkpoints)), None if baseline is None else str(baseline)
    settings = EvalSettings(**{**SMALL, "tasks": "loss", **settings})
    how = {"command": "surgery eval ...", "overwrite": overwrite, "restart": restart}
    return evaluate(EvaluationRequest(*models, out, settings, **how), Progress(silent=True)).report


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A source and another model of its family, in bfloat16 as most checkpoints are."""
    folder = tmp_path_factory.mktemp("models")
    return [make_checkpoint(folder / name, "llama", torch.bfloat16, seed) for seed, name in enumerate(("one", "two"))]


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """A report with everything cheap in it, and its folder."""
    out = tmp_path_factory.mktemp("eval") / "out"
    report = run([f"other={models[1]}"], models[0], out, **CHEAP)
    return report, out


@pytest.fixture(scope="module", autouse=True)
def one_report_with_plots(whole, request):
    """The first report has its plots; those of others would take longer than to measure tiny models."""
    request.getfixturevalue("no_pictures")


def rows_of(report):
    return {row["name"]: row for row in report["rows"]}


def test_rows_roles_and_bytes(whole):
    report, _ = whole
    rows = rows_of(report)
    # Both checkpoints have all bytes, so variants have nothing to match but the default ratios.
    results = {name: row["role"] for name, row in rows.items()}
    variants = dict.fromkeys(("int8 KV", "window 20", "window 10", "fp8", "oscar_int2"), "variant")
    assert results == {"one": "baseline", "other": "checkpoint", **variants}
    for name, row in rows.items():  # by formula what was measured, and so at any context
        assert row["kv"]["by_context"]["1024"] > 0, name
    assert rows["fp8"]["kv"]["ratio"] == 0.5
    assert report["baseline"] == "one" and report["settings"]["dtype"] == "float32"
    # 2 layers, 2 KV heads of 8 numbers, keys and values, 2 bytes each.
    assert rows["one"]["kv"]["bytes_per_token"] == 2 * 2 * 8 * 2 * 2
    assert rows["window 10"]["kv"]["ratio"] == pytest.approx(0.25, abs=0.04)
    assert 0.5 < rows["int8 KV"]["kv"]["ratio"] < 1


@pytest.mark.parametrize(
    ("family", "refused"),
    [("gemma3_window", {"window 20"}), ("qwen3_next_state", {"int8 KV", "oscar_int2", "window 20"})],
)
def test_variants_that_a_model_does_not_have_are_left_out_with_a_note(tmp_path, capsys, family, refused):
    source = make_checkpoint(tmp_path / "source", family)
    settings = EvalSettings(**{**SMALL, "tasks": "loss", "variants": "int8,oscar_int2,window"})
    report = evaluate(
        EvaluationRequest((str(source),), str(source), tmp_path / "out", settings, command=""), Progress()
    ).report
    variants = {"int8 KV", "oscar_int2", "window 20"}
    assert rows_of(report).keys() == {"source", *variants - refused}
    err = capsys.readouterr().err
    assert {variant for variant in variants if f"no {variant}: " in err} == refused


def test_differences_and_divergences_are_to_the_baseline(whole):
    rows = rows_of(whole[0])
    assert rows["one"]["comparison"] is None and rows["one"]["results"]["loss"]["divergence"] is None
    other = rows["other"]
    difference = other["results"]["loss"]["loss"] - rows["one"]["results"]["loss"]["loss"]
    assert other["comparison"]["loss"]["difference"] == pytest.approx(difference, abs=1e-9)
    assert other["results"]["loss"]["divergence"]["kl"] > 0.01
    assert 0 < rows["int8 KV"]["results"]["loss"]["divergence"]["kl"] < 0.05


def test_finished_results_are_not_measured_again(whole, models, monkeypatch):
    report, out = whole

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(LossTask, "run", never)
    again = run([f"renamed={models[1]}"], models[0], out, **CHEAP)
    assert rows_of(again)["renamed"]["results"] == rows_of(report)["other"]["results"]
    # Other data is another result.
    with pytest.raises(AssertionError, match="measured again"):
        run([models[1]], models[0], out, seed=1, overwrite=True)


def test_a_report_of_other_settings_is_not_replaced_unasked(whole, models, tmp_path):
    ResultStore.open(tmp_path)
    write_report(whole[0], tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    with pytest.raises(SurgeryError, match=r"another (?=.*context of kv)(?=.*length of loss).*; choose another"):
        run([models[1]], models[0], tmp_path, length=32)
    with pytest.raises(SurgeryError, match="another seed"):
        run([models[1]], models[0], tmp_path, seed=1)
    assert (tmp_path / "report.json").read_bytes() == before


def test_an_interrupted_evaluation_goes_on_unless_it_is_restarted(whole, models, tmp_path, monkeypatch):
    measured, real, last = [], LossTask.run, 1

    def counted(self, model, session, entries):
        if len(measured) == last:
            raise KeyboardInterrupt
        measured.append(model)
        return real(self, model, session, entries)

    monkeypatch.setattr(LossTask, "run", counted)
    with pytest.raises(KeyboardInterrupt):
        run([models[1]], models[0], tmp_path / "out", variants="none")
    monkeypatch.setattr(LossTask, "run", real)
    resumed = run([models[1]], models[0], tmp_path / "out", variants="none")
    for row, name in zip(resumed["rows"], ("one", "other"), strict=True):
        straight = rows_of(whole[0])[name]
        assert row["results"]["loss"] == straight["results"]["loss"] and row["comparison"] == straight["comparison"]
    last = None
    monkeypatch.setattr(LossTask, "run", counted)
    for restart, count in ((False, 1), (True, 3)):
        run([models[1]], models[0], tmp_path / "out", variants="none", restart=restart)
        assert len(measured) == count


def test_losses_of_mla_are_those_of_its_own_attention(models, tmp_path, monkeypatch):
    """The quality tasks run it by a fused kernel on CPUs, which its own attention is not."""
    out = tmp_path / "mla"
    convert_checkpoint(models[0], out, ConvertSettings(calibration="none", kv_ratio=0.5, carrier="stock"))
    [fused] = run([out], None, tmp_path / "fused", tasks="loss", decoded=4)["rows"]
    monkeypatch.setattr(runs, "use_equal_widths", lambda model: False)
    [own] = run([out], None, tmp_path / "own", tasks="loss", decoded=4)["rows"]
    assert fused["class"] == "DeepseekV3ForCausalLM"
    result, expected = fused["results"]["loss"], own["results"]["loss"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert result["cached"]["loss"] == pytest.approx(expected["cached"]["loss"], rel=1e-5)


@pytest.mark.parametrize(("vocabulary", "expected"), [(4096, ("builtin",)), (49_152, ("prose", "code"))])
def test_text_that_fits_the_model(vocabulary, expected):
    assert default_names(range(vocabulary)) == expected


def planned(names, baseline):
    settings = EvalSettings(**{**SMALL, "tasks": "loss", "variants": "none"})
    return plan_evaluation(EvaluationRequest(tuple(map(str, names)), baseline, None, settings), Progress(silent=True))


def test_the_baseline_itself_is_one_row_and_the_folder_is_named_for_the_first_checkpoint(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = map(str, models)
    assert [row["role"] for row in planned([one], one).rows] == ["baseline"]
    assert (planned([one, two], None).out, planned([two], one).out) == ("one-eval", "two-eval")


def test_other_folders_and_reports_of_more_are_left_alone(whole, models, tmp_path):
    _, out = whole
    write_report(whole[0], out)
    with pytest.raises(SurgeryError, match="row other, which the new one would not"):
        run([models[0]], None, out, **CHEAP)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SurgeryError, match="files other than an evaluation"):
        run([models[0]], None, tmp_path)


def test_cheap_baselines_that_a_report_no_longer_has_are_named(models, tmp_path, capsys):
    for variants, names in (("fp8,int8", ""), ("int4", "fp8, int8 KV"), ("int8,int4,fp8", "")):
        settings = EvalSettings(**{**SMALL, "tasks": "loss", "variants": variants})
        evaluate(EvaluationRequest((), str(models[0]), tmp_path, settings, writes=True), Progress())
        notes = " ".join(capsys.readouterr().err.split())
        assert (f"no longer in the report: {names};" in notes) if names else "no longer" not in notes


def test_a_missing_wandb_is_told_before_anything_is_measured(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SurgeryError, match="needs wandb"):
        run([models[0]], None, tmp_path / "out", wandb="project")
    assert not (tmp_path / "out").exists()


def test_a_wandb_that_cannot_start_is_told_before_anything_is_measured(models, tmp_path, monkeypatch):
    pytest.importorskip("wandb").teardown()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_service, "SECONDS", 1)
    for key, message in (("", "not logged in"), ("0" * 40, "no connection")):
        monkeypatch.setenv("WANDB_API_KEY", key)
        with pytest.raises(SurgeryError, match=message) as error:
            run([models[0]], None, tmp_path / "out", wandb="project")
        assert error.value.setting == "wandb" and not (tmp_path / "out").exists()


class Letters:
    """A plug-in's task whose settings lack the text."""

    name, native, measured = "letters", False, 0

    def settings(self):
        return {}

    def run(self, model, session, kept):
        Letters.measured += 1
        return {"share": session.limit / 0 if session.limit else 0.5}


def test_results_of_a_plugin_are_those_of_its_text_and_version(models, tmp_path, monkeypatch):
    monkeypatch.setitem(plugins._registered, "tasks", {"letters": lambda data: Letters()})
    (tmp_path / "text.txt").write_text("one two three " * 500)
    counts, keys = [], []
    for change in ({}, {}, {"data": str(tmp_path / "text.txt")}, {}):
        report = run([models[0]], None, tmp_path / "out", tasks="letters", overwrite=True, **change)
        keys.append(report["tasks"]["letters"]["text_sha256"])
        counts.append(Letters.measured)
    assert counts == [1, 1, 2, 2] and keys[0] == keys[1] == keys[3] != keys[2]
    monkeypatch.setattr(Registry, "distribution", lambda self, name: "letters 1.1")
    run([models[0]], None, tmp_path / "out", tasks="letters", overwrite=True)
    assert Letters.measured == 3
    with pytest.raises(SurgeryError, match=r"task letters of letters 1\.1 failed: ZeroDivisionError") as error:
        run([models[0]], None, tmp_path / "out", tasks="letters", overwrite=True, limit=1)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_other_tokenizers_are_refused(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    content = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SurgeryError, match="another tokenizer"):
        run([other], models[0], tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["{0}", "{0}/../one"], {}, "two models are named one"),
        (["no-such-folder"], {}, "no-such-folder"),
        (["{0}"], {"data": "no-such-file.txt"}, "no-such-file"),
        (["{0}"], {"tasks": "needle", "needle_lengths": "20"}, "too small"),
    ],
)
def test_what_cannot_be_measured_is_one_line(models, tmp_path, names, settings, message):
    with pytest.raises(SurgeryError, match=message) as error:
        run([name.format(*models) for name in names], None, tmp_path / "out", **settings)
    assert "\n" not in str(error.value)
