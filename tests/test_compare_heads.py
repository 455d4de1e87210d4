"""`surgery heads compare`: files that agree, measuring that goes on, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import listing, run_main, two_processes
from tiny_models import make_checkpoint

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.evaluation.run import Request, evaluate
from surgery.evaluation.settings import EvalSettings
from surgery.heads import compare as compare_heads
from surgery.heads.compare import CompareRequest, compare_patterns, publish_comparison, random_pattern
from surgery.heads.comparison_report import curve_table, markdown
from surgery.heads.pattern import HeadPattern
from surgery.structures import converter
from surgery.structures.mla.settings import ConvertSettings

pytestmark = pytest.mark.usefixtures("one_core")

QUICK = {"length": 128, "windows": 2, "prompts": 2, "device": "cpu", "sinks": 4, "recent": 16}
SHARES = (0.0, 0.5, 1.0)


def save(path, scores, **others):
    HeadPattern(torch.tensor(scores), "made", **{"sinks": 4, "recent": 16, **others}).save(path)
    return str(path)


@pytest.fixture
def patterns(tmp_path):
    """Files of two patterns that are each other's opposite, and a third with ties."""
    folder = tmp_path / "patterns"
    folder.mkdir()
    scores = {"up": [[0.1, 0.2], [0.3, 0.4]], "down": [[0.4, 0.3], [0.2, 0.1]], "tied": [[0.5, 0.5], [0.5, 0.1]]}
    return tuple(save(folder / f"{name}.safetensors", values) for name, values in scores.items())


@pytest.fixture(scope="module")
def measured(checkpoints_of_module, tmp_path_factory):
    """A comparison of two patterns on the tiny model: its request, what came of it and how often it measured."""
    folder = tmp_path_factory.mktemp("compare")
    files = (
        save(folder / "a.safetensors", [[0.1, 0.2], [0.3, 0.4]]),
        save(folder / "b.safetensors", [[0.2, 0.1], [0.3, 0.4]], spread=torch.full((2, 2), 0.25)),
    )
    request = CompareRequest(
        files, folder / "out", measure=str(checkpoints_of_module), shares=SHARES, random=2, command="surgery", **QUICK
    )
    with pytest.MonkeyPatch.context() as patch:
        calls = count_measurements(patch)
        return request, compare_patterns(request), len(calls)


@pytest.fixture(scope="module")
def checkpoints_of_module(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


def count_measurements(monkeypatch, last=None):
    real, calls = compare_heads._quality, []

    def counted(model, tasks, session, streams, *others):
        calls.append(streams)
        if len(calls) == last:
            raise KeyboardInterrupt
        return real(model, tasks, session, streams, *others)

    monkeypatch.setattr(compare_heads, "_quality", counted)
    return calls


def points(comparison):
    return {(point["name"], point["share"]): point for point in comparison.content["measured"]["points"]}


def test_tables_pictures_and_json_agree(measured):
    request, comparison, _ = measured
    names = ["comparison.json", "comparison.md", "curve.png", "heads.png"]
    assert sorted(path.name for path in comparison.written) == names
    content = json.loads((request.out / "comparison.json").read_text())
    assert content == comparison.content
    text = (request.out / "comparison.md").read_text()
    assert text == markdown(content)
    for picture in ("heads.png", "curve.png"):
        assert (request.out / picture).read_bytes().startswith(b"\x89PNG") and picture in text
    found = content["measured"]
    header, rows = curve_table(found, "loss")
    assert header == ["", "0%", "50%", "100%"]
    assert [row[0] for row in rows] == ["a", "b", "random (2)"]
    for (name, *cells), wanted in zip(rows[:2], ("a", "b"), strict=True):
        assert name == wanted
        for cell, share in zip(cells, SHARES, strict=True):
            rise = points(comparison)[name, share]["loss"] - found["source"]["loss"]
            assert cell == f"{rise:+.4f}" and cell in text
    assert content["scoring"]["b"]["mean_spread"] == 0.25
    assert content["agreement"]["patterns"].keys() == {"a", "b"}
    assert f"{content['agreement']['pairs'][0]['spearman']:.2f}" in text


def test_the_source_is_measured_as_evaluations_do(measured, checkpoints_of_module, tmp_path):
    _, comparison, _ = measured
    settings = EvalSettings(
        tasks=("loss", "recall"), variants=(), windows=2, length=128, decoded=0, recall_prompts=2, seed=2,
        batch_size=4, device="cpu",
    )  # fmt: skip
    evaluation = evaluate(
        Request((str(checkpoints_of_module),), None, tmp_path / "eval", settings), Progress(silent=True)
    )
    results = evaluation.report["rows"][0]["results"]
    source = comparison.content["measured"]["source"]
    assert source == {"loss": results["loss"]["loss"], "recall": results["recall"]["accuracy"]}


def test_none_streaming_is_the_source_and_all_streaming_is_the_same_for_all(measured):
    _, comparison, _ = measured
    found, source = points(comparison), comparison.content["measured"]["source"]
    names = ("a", "b", "random 1", "random 2")
    assert {(found[name, 0.0]["loss"], found[name, 0.0]["kv_ratio"]) for name in names} == {(source["loss"], 1.0)}
    losses = {found[name, 1.0]["loss"] for name in names}
    assert len(losses) == 1 and losses != {source["loss"]}
    assert found["a", 1.0]["kv_ratio"] == pytest.approx(19 / 128)
    assert found["a", 0.5]["kv_ratio"] == pytest.approx((1 + 19 / 128) / 2)
    assert [found["a", share]["streaming"] for share in SHARES] == [0, 2, 4]


def test_equal_plans_are_measured_once(measured):
    _, _, calls = measured
    # a and b keep the same half; random patterns may keep any.
    halves = {tuple(map(tuple, random_pattern(2, 2, seed).full_heads(0.5).tolist())) for seed in (0, 1)}
    halves.add(((False, False), (True, True)))
    assert calls == 2 + len(halves)


def test_measuring_goes_on(measured, tmp_path, monkeypatch):
    request, comparison, calls = measured
    again = CompareRequest(**{**vars(request), "out": tmp_path / "out"})
    count_measurements(monkeypatch, last=3)
    with pytest.raises(KeyboardInterrupt):
        compare_patterns(again)
    assert not (tmp_path / "out" / "comparison.json").exists()
    rest = count_measurements(monkeypatch)
    assert compare_patterns(again).content["measured"] == comparison.content["measured"]
    assert len(rest) == calls - 2
    monkeypatch.undo()
    none = count_measurements(monkeypatch)
    with pytest.raises(SurgeryError, match=r"comparison\.json: exists; choose another --out or pass --overwrite"):
        compare_patterns(again)
    compare_patterns(CompareRequest(**{**vars(again), "overwrite": True}))
    assert not none
    compare_patterns(CompareRequest(**{**vars(again), "overwrite": True, "restart": True}))
    assert len(none) == calls


def test_a_model_that_takes_less_is_measured_at_what_it_takes(measured, tmp_path):
    request, _, _ = measured
    longer = CompareRequest(**{**vars(request), "out": tmp_path / "out", "length": 1024, "shares": (1.0,), "random": 0})
    found = compare_patterns(longer).content["measured"]
    assert found["length"] == 256
    assert found["points"][0]["kv_ratio"] == pytest.approx(19 / 256)


def test_patterns_alone(patterns, tmp_path):
    comparison = compare_patterns(CompareRequest(patterns, tmp_path / "out"))
    assert comparison.content["measured"] is None
    assert sorted(path.name for path in comparison.written) == ["comparison.json", "comparison.md", "heads.png"]
    pairs = {(pair["a"], pair["b"]): pair for pair in comparison.content["agreement"]["pairs"]}
    assert pairs["up", "down"]["spearman"] == pytest.approx(-1)
    assert "curve.png" not in (tmp_path / "out" / "comparison.md").read_text()
    published = publish_comparison(comparison, tmp_path / "published" / "here")
    assert sorted(path.name for path in published) == ["comparison.json", "comparison.md", "heads.png"]
    assert listing(tmp_path / "published") == [
        "here", "here/comparison.json", "here/comparison.md", "here/heads.png"
    ]  # fmt: skip
    (tmp_path / "file").write_text("x")
    with pytest.raises(SurgeryError, match="file"):
        publish_comparison(comparison, tmp_path / "file" / "folder")


def test_one_pattern_alone(patterns, tmp_path):
    comparison = compare_patterns(CompareRequest(patterns[:1], tmp_path / "out"))
    assert comparison.content["agreement"]["pairs"] == []
    assert "## Ties" in (tmp_path / "out" / "comparison.md").read_text()


def test_a_falling_loss_is_drawn(measured):
    from surgery.heads.comparison_report import curve_figure

    content = json.loads(json.dumps(measured[1].content))
    for point in content["measured"]["points"]:
        point["loss"] = content["measured"]["source"]["loss"] - point["share"]
    assert curve_figure(content).axes[1].get_ylim()[0] < -0.99


def test_the_verb(patterns, checkpoints_of_module, tmp_path, monkeypatch, capsys):
    verb = ["heads", "compare", f"first={patterns[0]}", *patterns[1:], "--measure", checkpoints_of_module]
    flags = [part for name, value in QUICK.items() for part in (f"--{name}", value)] + ["--random", 1]
    out = ["--out", tmp_path / "out", "--shares", "0.5,0.75"]
    code, shown, err = run_main(monkeypatch, capsys, *verb, *flags, *out)
    assert code == 0 and "\x1b" not in shown and "measure" in err
    assert "first, down" in shown and "loss increase by the share of heads that stream" in shown
    assert str(tmp_path / "out" / "curve.png") in shown
    code, printed, _ = run_main(monkeypatch, capsys, *verb, *flags, *out, "--json", "--overwrite")
    assert code == 0
    assert json.loads(printed) == json.loads((tmp_path / "out" / "comparison.json").read_text())


BAD = {
    "missing": (["{folder}/absent.safetensors"], "absent.safetensors: no such file"),
    "damaged": (["{folder}/damaged.safetensors"], "not a readable pattern"),
    "no pattern": (["{model}/model.safetensors"], "no pattern of heads"),
    "other shape": (["{up}", "{folder}/wide.safetensors"], "patterns of one model are needed"),
    "one name": (["{up}", "{up}"], "two patterns are called up"),
    "taken name": (["random 1={up}"], "random patterns are called"),
    "other model": (["{folder}/wide.safetensors", "--measure", "{model}"], "has 2 layers of 2 KV heads"),
    "sinks not agreed": (["{up}", "{folder}/other.safetensors", "--measure", "{model}"], "--sinks: the patterns say"),
    "sinks not said": (["{folder}/silent.safetensors", "--measure", "{model}"], "--sinks: the patterns do not say"),
    "no checkpoint": (["{up}", "--measure", "{folder}/absent"], "absent: no such folder"),
    "MLA": (["{up}", "--measure", "{folder}/mla"], "heads of MLA share one latent"),
    "short": (["{up}", "--measure", "{model}", "--length", "20"], "no head would miss anything"),
    "share": (["{up}", "--shares", "1.5"], "shares [1.5]"),
    "shares": (["{up}", "--shares", "half"], "--shares must be numbers, not half"),
    "windows": (["{up}", "--windows", "0"], "windows must be at least 1"),
    "other things": (["{up}", "--out", "{folder}/patterns"], "choose another --out"),
    "file as output": (["{up}", "--out", "{folder}/damaged.safetensors"], "damaged.safetensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_one_line(case, patterns, checkpoints_of_module, tmp_path, monkeypatch, capsys):
    arguments, told = BAD[case]
    (tmp_path / "damaged.safetensors").write_bytes(Path(patterns[0]).read_bytes()[:-3])
    save(tmp_path / "wide.safetensors", [[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]])
    save(tmp_path / "other.safetensors", [[0.1, 0.2], [0.3, 0.4]], sinks=8)
    save(tmp_path / "silent.safetensors", [[0.1, 0.2], [0.3, 0.4]], sinks=None)
    if case == "MLA":
        converter.convert(checkpoints_of_module, tmp_path / "mla", ConvertSettings(calibration="none"))
    before = listing(tmp_path)
    filled = [part.format(up=patterns[0], model=checkpoints_of_module, folder=tmp_path) for part in arguments]
    out = [] if "--out" in filled else ["--out", tmp_path / "out"]
    code, printed, err = run_main(monkeypatch, capsys, "heads", "compare", *filled, *out)
    assert code == 1 and printed == ""
    said = [line for line in err.splitlines() if line.startswith("surgery: error: ")]
    assert len(said) == 1 and told in said[0] and "Traceback" not in err
    assert listing(tmp_path) == before


@pytest.mark.slow
def test_two_processes_measure_what_one_does(measured, tmp_path):
    request, comparison, _ = measured
    flags = [part for name, value in QUICK.items() for part in (f"--{name}", str(value))]
    done = two_processes(
        *("heads", "compare", *request.patterns, "--measure", request.measure, "--random", 2, *flags, "--json"),
        *("--shares", "0,0.5,1", "--out", tmp_path / "out"),
    )
    assert json.loads(done.stdout)["measured"] == comparison.content["measured"]


def test_a_foreign_pattern_is_compared(patterns, tmp_path):
    folder = tmp_path / "duo"
    folder.mkdir()
    (folder / "full_attention_heads.tsv").write_text("0.1\t0.2\n0.3\t0.9\n")
    (folder / "config.json").write_text('{"sink_size": 64, "recent_size": 256}')
    comparison = compare_patterns(CompareRequest((patterns[0], str(folder)), tmp_path / "out"))
    assert comparison.content["agreement"]["pairs"][0]["spearman"] == pytest.approx(1)
    assert comparison.content["scoring"]["duo"]["sinks"] == 64
    shutil.rmtree(folder)
