"""Checkpoints on the hub, which is a stand-in on this machine: what is sent, when, and what is refused."""

import hashlib
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import yaml
from command_line import run_main
from conversions import convert_checkpoint
from hostile import cases
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from local_hub import local_hub
from tiny_models import SHORT_TEXT_FLAGS, make_checkpoint

from surgery.checkpoint.file_hashes import hash_files
from surgery.checkpoint.hub import id_of_snapshot
from surgery.common.errors import SurgeryError
from surgery.common.lineage import lineage, lineage_of
from surgery.evaluation.models import Checkpoint
from surgery.reporting.front_matter import front_matter
from surgery.reporting.publish import Publication
from surgery.reporting.report import previous_report
from surgery.reporting.upload import prepare_upload
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.training.settings import HealSettings
from surgery.training.trackers import _wandb_options


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a source with a card of its own, of which a license is inherited."""
    path = make_checkpoint(tmp_path_factory.mktemp("push") / "models--org--base" / "snapshots" / "abc", "llama")
    (path / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\ntags: [theirs]\n---\n# Base\n")
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "small"
    return convert_checkpoint(source, out, KVHeadsSettings(kv_heads=1, calibration="none", device="cpu")).path


@pytest.fixture
def hub(monkeypatch):
    with local_hub(monkeypatch) as hub:
        yield hub


def test_all_files_of_a_result_are_pushed(converted, hub, monkeypatch, capsys):
    code, output, err = run_main(monkeypatch, capsys, "push", converted, "me/small")
    assert code == 0, err
    repo = hub.repos["me/small"]
    assert repo["private"] and repo["commits"] == ["Converted by model-surgery"]
    assert f"{hub.address}/me/small" in output
    names = {path.relative_to(converted).as_posix() for path in converted.rglob("*") if path.is_file()}
    assert set(repo["files"]) == names
    for name in names - {"README.md", "surgery_report.json"}:
        assert repo["files"][name] == (converted / name).read_bytes(), name


def test_paths_are_published_without_folders(converted, hub, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(converted, tmp_path / "result")
    report = json.loads((folder / "surgery_report.json").read_text())
    report["command"] = "surgery convert /home/me/base --calibration='/home/me/texts/a.txt' --heads org/name"
    report["settings"] |= {"calibration": "~/private/a.txt", "held_out_text": "C:\\Users\\me\\held.txt"}
    settings = {"data": "/home/me/text.jsonl", "student": "see /mnt/models/base for all", "url": "https://x.y/a/b"}
    (folder / "heal.json").write_text(json.dumps({"settings": settings, "command": "surgery heal /home/me/x"}))
    (folder / "heal.jsonl").write_text(json.dumps({"event": "start", "settings": settings}) + "\n{}\n")
    (folder / "README.source.md").write_text("---\nlicense: mit\nbase_model: /home/me/base\n---\nfrom `/home/me/x/y`")
    report["files"] = hash_files(folder)
    (folder / "surgery_report.json").write_text(json.dumps(report))
    code, output, err = run_main(monkeypatch, capsys, "push", folder, "me/clean", "--public")
    assert code == 0 and "visible to everybody" in " ".join(output.split()), err
    files = hub.repos["me/clean"]["files"]
    for name in ("surgery_report.json", "heal.json", "heal.jsonl", "README.md", "README.source.md"):
        assert not any(word in files[name].decode() for word in ("/home", "private", "Users", "mnt"))
    published = json.loads(files["surgery_report.json"])
    assert published["command"] == "surgery convert base --calibration='a.txt' --heads org/name"
    assert (published["settings"]["calibration"], published["settings"]["held_out_text"]) == ("a.txt", "held.txt")
    expected = {"data": "text.jsonl", "student": "see base for all", "url": "https://x.y/a/b"}
    assert json.loads(files["heal.json"])["settings"] == expected
    for name, digest in published["files"].items():
        assert hashlib.sha256(files[name]).hexdigest() == digest, name
    assert lineage(published) == lineage(report)
    assert json.loads((folder / "surgery_report.json").read_text()) == report  # here it stays


def test_a_published_checkpoint_is_verified_where_it_was_downloaded_to(converted, hub, tmp_path, monkeypatch, capsys):
    assert run_main(monkeypatch, capsys, "push", converted, "me/whole")[0] == 0
    for name, content in hub.repos["me/whole"]["files"].items():
        (tmp_path / "download" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "download" / name).write_bytes(content)
    code, _, err = run_main(monkeypatch, capsys, "verify", tmp_path / "download", "--device", "cpu")
    assert code == 0, err


STRAYS = ("env", ".env", "wandb/debug.log", "optimizer.pt", "x.py", ".git/config", "chat_template.jinja", "model.gguf")


@given(st.lists(st.sampled_from(STRAYS), unique=True), st.booleans())
@cases(15)
def test_nothing_but_what_the_report_lists_is_uploaded(converted, tmp_path_factory, names, linked):
    folder = shutil.copytree(converted, tmp_path_factory.mktemp("strays") / "result")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to("/etc/hostname") if linked else (folder / name).write_text("secret")
    upload = prepare_upload(folder, "me/x")
    listed = json.loads((folder / "surgery_report.json").read_text())["files"]
    assert upload.files.keys() == {*listed, "surgery_report.json", "README.md", "README.source.md"}
    assert len(upload.strays) == len(names)


def test_stray_files_are_named_and_stay(converted, hub, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(converted, tmp_path / "result")
    (folder / "id_rsa").symlink_to("/etc/hostname")
    (folder / "env").write_text("TOKEN=1")
    before = set(hub.repos)
    code, output, _ = run_main(monkeypatch, capsys, "push", folder, "me/strays", "--dry-run")
    assert code == 0 and "not uploaded: env, id_rsa" in output and set(hub.repos) == before
    assert run_main(monkeypatch, capsys, "push", folder, "me/strays")[0] == 0
    assert not {"id_rsa", "env"} & hub.repos["me/strays"]["files"].keys()
    output = run_main(monkeypatch, capsys, "push", folder, "me/strays", "--dry-run", "--json")[1]
    preview = json.loads(output)
    assert preview["not_uploaded"] == ["env", "id_rsa"] and preview["files"]["model.safetensors"] > 0


@pytest.mark.parametrize("name", ["config.json", "README.source.md", "surgery_report.json", "model.safetensors"])
def test_links_in_the_place_of_listed_files_are_refused(converted, hub, tmp_path, name):
    folder = shutil.copytree(converted, tmp_path / "result")
    (folder / name).rename(tmp_path / "real")
    (folder / name).symlink_to(tmp_path / "real")
    with pytest.raises(SurgeryError, match=f"{name}: is a link"):
        prepare_upload(folder, "me/x")
    blob = tmp_path / "models--me--x" / "blobs" / ("0" * 64)
    blob.parent.mkdir(parents=True)
    (tmp_path / "real").rename(blob)
    (folder / name).unlink()
    (folder / name).symlink_to(blob)
    assert name in prepare_upload(folder, "me/x").files


def test_changed_and_missing_files_are_refused(converted, hub, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "result")
    weights = folder / "model.safetensors"

    def changed(upload):
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")

    with pytest.raises(SurgeryError, match=r"model.safetensors: was changed while it was read"):
        Publication("me/other").push(folder, changed)
    assert not hub.repos["me/other"]["files"]
    with pytest.raises(SurgeryError, match=r"model.safetensors: was changed after it was written"):
        prepare_upload(folder, "me/x")
    weights.unlink()
    with pytest.raises(SurgeryError, match=r"model.safetensors is missing"):
        prepare_upload(folder, "me/x")


def test_a_report_without_a_list_of_files_is_refused(converted, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "result")
    report = json.loads((folder / "surgery_report.json").read_text())
    (folder / "surgery_report.json").write_text(json.dumps(report | {"files": None}))
    with pytest.raises(SurgeryError, match="lists no files"):
        prepare_upload(folder, "me/x")


def test_the_card_is_what_the_hub_reads(converted, hub, source, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run_main(monkeypatch, capsys, "convert", source, "--to", "mqa", "--out", out, *SHORT_TEXT_FLAGS)[0] == 0
    assert run_main(monkeypatch, capsys, "push", out, "lab/small", "--public")[0] == 0
    assert not hub.repos["lab/small"]["private"]
    card = ModelCard(hub.repos["lab/small"]["files"]["README.md"].decode())
    report = previous_report(out)
    assert (card.data.base_model, card.data.license, card.data.language) == ("org/base", "mit", ["en"])
    assert card.data.tags == ["model-surgery", report["target"]["to"], "kv-cache-compression"]
    assert card.data.model_name == "lab/small" and 'from_pretrained("lab/small"' in card.text
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    last = report["ladder"][-1]
    assert results["loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert results["perplexity"] == pytest.approx(math.exp(last["loss"]), rel=1e-6)
    assert results["kv_cache_ratio"] == report["kv"]["ratio"] == 0.5
    # A healing that was not measured has other losses than its conversion.
    unmeasured = front_matter(SimpleNamespace(**{**report, "healing": {"quality": []}}), "healed")
    assert [each.metric_type for each in ModelCard(unmeasured).data.eval_results] == ["kv_cache_ratio"]


def test_a_source_that_is_no_hub_id_is_not_named(tmp_path):
    result = make_checkpoint(tmp_path / "my model: [x]", "llama")
    out = convert_checkpoint(
        result, tmp_path / "out", KVHeadsSettings(kv_heads=1, calibration="none", device="cpu")
    ).path
    head = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    assert "base_model" not in head and head["model-index"][0]["name"] == "out"


def test_the_base_model_can_be_named(converted, hub, monkeypatch, capsys):
    code, output, _ = run_main(monkeypatch, capsys, "push", converted, "me/b", "--base-model", "other/name", "--json")
    assert code == 0 and json.loads(output) == {"repo": "me/b", "url": f"{hub.address}/me/b"}
    assert ModelCard(hub.repos["me/b"]["files"]["README.md"].decode()).data.base_model == "other/name"


def test_what_is_there_is_replaced_only_when_asked(converted, hub, monkeypatch, capsys):
    hub.repos["me/c"] = {"private": False, "files": {".gitattributes": b"", "old.safetensors": b"x"}, "commits": []}
    code, _, err = run_main(monkeypatch, capsys, "push", converted, "me/c")
    assert code == 1 and "holds 1 files; choose another name or pass --overwrite" in err
    assert hub.repos["me/c"]["files"].keys() == {".gitattributes", "old.safetensors"}
    assert run_main(monkeypatch, capsys, "push", converted, "me/c", "--overwrite")[0] == 0
    values = hub.repos["me/c"]["files"]
    assert "old.safetensors" not in values and ".gitattributes" in values and "model.safetensors" in values


@pytest.mark.parametrize(("repo", "message"), [("small", "use org/name"), ("others/small", "choose a name in me, lab")])
def test_refused_before_the_work(repo, message, converted, hub, monkeypatch, capsys):
    code, _, err = run_main(monkeypatch, capsys, "push", converted, repo)
    assert code == 1 and message in err and err.count("\n") == 1 and not hub.repos


def test_nobody_is_logged_in(converted, hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    code, _, err = run_main(monkeypatch, capsys, "push", converted, "me/x")
    assert code == 1 and "run `hf auth login`" in err and not hub.repos


def test_a_refused_upload_leaves_the_checkpoint(converted, hub, monkeypatch, capsys):
    hub.refuses_commits = True
    code, _, err = run_main(monkeypatch, capsys, "push", converted, "me/small")
    assert code == 1 and f"`surgery push {converted} me/small` repeats the upload" in err
    assert (converted / "model.safetensors").is_file() and not hub.repos["me/small"]["files"]


def test_only_what_we_made_is_pushed(source, hub, monkeypatch, capsys):
    code, _, err = run_main(monkeypatch, capsys, "push", source, "me/x")
    assert code == 1 and "has no surgery_report.json" in err and not hub.repos


def test_ids_of_snapshots(tmp_path):
    assert id_of_snapshot(tmp_path / "models--org--a--b" / "snapshots" / "abc") == ("org/a--b", "abc")
    assert id_of_snapshot(tmp_path / "models--org--a" / "abc") is None
    assert id_of_snapshot(tmp_path / "org" / "snapshots" / "abc") is None


def test_a_source_of_the_hub_is_found_again_there(converted, source, monkeypatch):
    from surgery.checkpoint import CheckpointReader
    from surgery.healing import recorded_source

    requests = []
    monkeypatch.setattr(recorded_source, "download", lambda *each, **more: requests.append((each, more)) or source)
    assert recorded_source.find_source(CheckpointReader.open(converted)) == source
    assert requests == [(("org/base",), {"revision": "abc"})]

    def gone(*each, **more):
        raise SurgeryError("not reachable")

    monkeypatch.setattr(recorded_source, "download", gone)
    with pytest.raises(SurgeryError, match="pass --teacher"):
        recorded_source.find_source(CheckpointReader.open(converted))


def test_one_group(checkpoints, tmp_path):
    out = tmp_path / "small"
    convert_checkpoint(checkpoints("llama"), out, KVHeadsSettings(kv_heads=1, calibration="none", device="cpu"))
    group = lineage_of(out)
    assert re.fullmatch(r"mqa-[0-9a-f]{8}", group)  # what one KV head is called
    assert Checkpoint.open(str(out)).conversion()["lineage"] == group
    settings = HealSettings(student=str(out), wandb="p", wandb_mode="offline")
    healing = _wandb_options(settings, tmp_path / "small-healed.tracking")
    assert (healing["group"], healing["name"]) == (group, "small-healed")
    assert lineage_of(checkpoints("llama")) is None
