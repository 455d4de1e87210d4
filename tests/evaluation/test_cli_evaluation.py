"""`surgery eval`, `compare` and `run` as a user types them."""

import json
import re
from functools import partial

import pytest
import torch
from command_line import run_main
from tiny_models import make_checkpoint

from surgery.checkpoint.named_models import demo_model
from surgery.common.errors import SurgeryError
from surgery.eval.tasks import lm_harness

pytestmark = pytest.mark.usefixtures("no_pictures")

QUICK = ["--windows", "2", "--length", "32", "--tasks", "loss", "--seed", "5", "--device", "cpu", "--variants", "none"]


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs `surgery ARGUMENTS`: exit code, standard output, standard error."""
    return partial(run_main, monkeypatch, capsys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    (folder / "quick.yaml").write_text("decoded: 8\n")
    for seed, name in enumerate(("source", "small")):
        make_checkpoint(folder / name, "llama", torch.float32, seed)
    return folder


def test_evaluations_made_apart_compare(main, folder):
    config = ["--config", folder / "quick.yaml"]
    code, out, _ = main("eval", folder / "source", *QUICK, *config, "--out", folder / "first")
    assert code == 0 and "KV B/token" in out and "no baseline" in out
    compared = [folder / "small", "--baseline", folder / "source", "--out", folder / "second", "--json"]
    code, out, err = main("eval", *compared, *QUICK, *config)
    report = json.loads(out)
    assert code == 0 and [row["name"] for row in report["rows"]] == ["source", "small"]
    assert re.search(r"^about \d+\.\d s left for the other models$", err, re.MULTILINE)
    assert report["command"].startswith("surgery eval ")
    assert re.search(r"loss: \d+ ", err)

    code, out, _ = main("compare", folder / "first", folder / "second" / "report.json", "--out", folder / "both")
    assert code == 0 and "Δ loss" in out
    merged = json.loads((folder / "both" / "report.json").read_text())
    assert merged["rows"][1]["comparison"] == report["rows"][1]["comparison"]
    assert "| small |" in (folder / "both" / "report.md").read_text()

    main("eval", folder / "source", *QUICK, *config, "--seed", "6", "--out", folder / "third")
    code, out, err = main("compare", folder / "first", folder / "third", "--out", folder / "none")
    assert code == 1 and not out and err.count("\n") == 1
    assert "seed is 6" in err
    assert not (folder / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "no-such-model"], "no-such-model"),
        (["eval", "{folder}/source", "--tasks", "lm-eval:no-such-task"], "no-such-task"),
        (["compare", "{folder}"], "report.json"),
        (["run", "{folder}/nothing.yaml"], "nothing.yaml"),
    ],
)
def test_mistakes_are_one_line(main, folder, tmp_path, monkeypatch, arguments, message):
    index = lm_harness._index
    if "lm-eval:no-such-task" in arguments:
        pytest.importorskip("lm_eval")
        # The harness' own tasks take long to index.
        monkeypatch.setattr(lm_harness, "_index", lambda *source: index(*source[:-1], False))
    monkeypatch.chdir(tmp_path)
    code, out, err = main(*(argument.format(folder=folder) for argument in arguments))
    last = err.strip().splitlines()[-1]
    assert code == 1 and not out
    assert last.startswith("surgery: error: ") and message in last
    assert not list(tmp_path.iterdir())


def test_the_baseline_may_be_the_model_that_ships(main, monkeypatch):
    requests = []

    def stop(request, progress):
        requests.append(request.baseline)
        raise SurgeryError("seen enough")

    monkeypatch.setattr("surgery.evaluation.run.evaluate", stop)
    for baseline in ("builtin", "source=builtin", f"other={demo_model()}"):
        assert main("eval", demo_model(), "--baseline", baseline)[0] == 1
    assert requests == [str(demo_model()), f"source={demo_model()}", f"other={demo_model()}"]
