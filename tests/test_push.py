"""Checkpoints on the hub, which is a stand-in on this machine: what is sent, when, and what is refused."""

import json
import math

import pytest
import yaml
from command_line import run_main
from huggingface_hub import ModelCard
from local_hub import local_hub
from tiny_models import make_checkpoint

from surgery.checkpoint.hub import id_of_snapshot
from surgery.common.errors import SurgeryError
from surgery.reporting.report import previous_report
from surgery.structures import converter
from surgery.structures.kv_heads.settings import KVHeadsSettings

QUICK = ["--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "1", "--fit-steps", "0"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """With a card of its own, of which a licence is inherited."""
    path = make_checkpoint(tmp_path_factory.mktemp("push") / "models--org--base" / "snapshots" / "abc", "llama")
    (path / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\ntags: [theirs]\n---\n# Base\n")
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "small"
    return converter.convert(source, out, KVHeadsSettings(kv_heads=1, calibration="none", device="cpu")).path


@pytest.fixture
def hub(monkeypatch):
    with local_hub(monkeypatch) as hub:
        yield hub


def test_a_conversion_is_pushed_when_it_is_verified(source, hub, tmp_path, monkeypatch, capsys):
    arguments = ["convert", source, "--to", "gqa", "--out", tmp_path / "out", *QUICK, "--push-to-hub", "me/small"]
    seen = []
    finish = converter._conclude
    monkeypatch.setattr(converter, "_conclude", lambda *each: (seen.append(list(hub.repos)), finish(*each))[1])
    code, shown, told = run_main(monkeypatch, capsys, *arguments)
    assert code == 0, told
    assert seen == [[]]  # when the conversion was verified, nothing was there yet
    repo = hub.repos["me/small"]
    assert repo["private"] and repo["commits"] == ["Converted by model-surgery"]
    assert f"pushed to {hub.address}/me/small" in shown
    held = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(repo["files"]) == held
    for name in held - {"README.md"}:
        assert repo["files"][name] == (tmp_path / "out" / name).read_bytes(), name


def test_the_card_is_what_the_hub_reads(converted, hub, source, tmp_path, monkeypatch, capsys):
    arguments = ["convert", source, "--to", "mqa", "--out", tmp_path / "out", *QUICK, "--push-to-hub", "lab/small"]
    assert run_main(monkeypatch, capsys, *arguments, "--public")[0] == 0
    assert not hub.repos["lab/small"]["private"]
    card = ModelCard(hub.repos["lab/small"]["files"]["README.md"].decode())
    report = previous_report(tmp_path / "out")
    assert (card.data.base_model, card.data.license, card.data.language) == ("org/base", "mit", ["en"])
    assert card.data.tags == ["model-surgery", report["target"]["to"], "kv-cache-compression"]
    assert card.data.model_name == "lab/small" and 'from_pretrained("lab/small"' in card.text
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    last = report["ladder"][-1]
    assert found["loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(last["loss"]), rel=1e-6)
    assert found["kv_cache_ratio"] == report["kv"]["ratio"] == 0.5


def test_a_source_that_is_no_hub_id_is_not_named(tmp_path):
    made = make_checkpoint(tmp_path / "my model: [x]", "llama")
    out = converter.convert(made, tmp_path / "out", KVHeadsSettings(kv_heads=1, calibration="none", device="cpu")).path
    head = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    assert "base_model" not in head and head["model-index"][0]["name"] == "out"


def test_the_base_model_can_be_named(converted, hub, monkeypatch, capsys):
    code, shown, _ = run_main(monkeypatch, capsys, "push", converted, "me/b", "--base-model", "other/name", "--json")
    assert code == 0 and json.loads(shown) == {"repo": "me/b", "url": f"{hub.address}/me/b"}
    assert ModelCard(hub.repos["me/b"]["files"]["README.md"].decode()).data.base_model == "other/name"


def test_what_is_there_is_replaced_only_when_asked(converted, hub, monkeypatch, capsys):
    hub.repos["me/c"] = {"private": False, "files": {".gitattributes": b"", "old.safetensors": b"x"}, "commits": []}
    code, _, told = run_main(monkeypatch, capsys, "push", converted, "me/c")
    assert code == 1 and "holds 1 files; choose another name or pass --overwrite" in told
    assert hub.repos["me/c"]["files"].keys() == {".gitattributes", "old.safetensors"}
    assert run_main(monkeypatch, capsys, "push", converted, "me/c", "--overwrite")[0] == 0
    held = hub.repos["me/c"]["files"]
    assert "old.safetensors" not in held and ".gitattributes" in held and "model.safetensors" in held


@pytest.mark.parametrize(
    ("repo", "told"),
    [("small", "give org/name"), ("others/small", "you may write to me, lab")],
)
def test_refused_before_the_work(repo, told, source, hub, tmp_path, monkeypatch, capsys):
    arguments = ["convert", source, "--out", tmp_path / "out", "--push-to-hub", repo]
    code, _, said = run_main(monkeypatch, capsys, *arguments)
    assert code == 1 and told in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists() and not hub.repos


def test_nobody_is_logged_in(source, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    code, _, told = run_main(monkeypatch, capsys, "convert", source, "--out", tmp_path / "o", "--push-to-hub", "me/x")
    assert code == 1 and "run `hf auth login`" in told and not hub.repos


def test_a_refused_upload_leaves_the_checkpoint(source, hub, tmp_path, monkeypatch, capsys):
    hub.refuses_commits = True
    arguments = ["convert", source, "--to", "gqa", "--out", tmp_path / "out", *QUICK, "--push-to-hub", "me/small"]
    code, _, told = run_main(monkeypatch, capsys, *arguments)
    assert code == 1 and f"`surgery push {tmp_path / 'out'} me/small` tries again" in told
    assert (tmp_path / "out" / "model.safetensors").is_file() and not hub.repos["me/small"]["files"]


def test_only_what_we_made_is_pushed(source, hub, monkeypatch, capsys):
    code, _, told = run_main(monkeypatch, capsys, "push", source, "me/x")
    assert code == 1 and "has no surgery_report.json" in told and not hub.repos


def test_how_to_push_needs_a_repository(source, monkeypatch, capsys):
    code, _, told = run_main(monkeypatch, capsys, "convert", source, "--public")
    assert code == 1 and "give --push-to-hub too" in told


def test_ids_of_snapshots(tmp_path):
    assert id_of_snapshot(tmp_path / "models--org--a--b" / "snapshots" / "abc") == ("org/a--b", "abc")
    assert id_of_snapshot(tmp_path / "models--org--a" / "abc") is None
    assert id_of_snapshot(tmp_path / "org" / "snapshots" / "abc") is None


def test_a_source_of_the_hub_is_found_again_there(converted, source, monkeypatch):
    from surgery.checkpoint import CheckpointReader
    from surgery.healing import recorded_source

    asked = []
    monkeypatch.setattr(recorded_source, "download", lambda *each, **more: asked.append((each, more)) or source)
    assert recorded_source.find_source(CheckpointReader.open(converted)) == source
    assert asked == [(("org/base",), {"revision": "abc", "allow_pickle": False})]

    def gone(*each, **more):
        raise SurgeryError("not reachable")

    monkeypatch.setattr(recorded_source, "download", gone)
    with pytest.raises(SurgeryError, match="name a teacher"):
        recorded_source.find_source(CheckpointReader.open(converted))
