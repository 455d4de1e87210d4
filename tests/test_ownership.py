"""A file can only disappear if the user named its output with --overwrite and this program wrote it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from command_line import run_main
from tiny_models import HELD_OUT

from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.checkpoint.disk import write_whole
from surgery.checkpoint.file_hashes import CARD, REPORT, hash_files
from surgery.checkpoint.staging import Staging
from surgery.checkpoint.work_folder import WorkFolder
from surgery.common.errors import SurgeryError
from surgery.common.ownership import inventory
from surgery.common.pictures import Svg
from surgery.evaluation.names import name_and_path
from surgery.evaluation.output import write_report
from surgery.evaluation.preparation import file_name
from surgery.evaluation.store import ResultStore
from surgery.workflow.recipe import Recipe


def write_result(out: Path, *, overwrite: bool = False) -> Path:
    """A result as conversions write it."""
    with CheckpointWriter(out, {"a": TensorSpec(torch.float32, (2,))}, overwrite=overwrite) as writer:
        writer.write("a", torch.ones(2))
        writer.write_json("config.json", {"model_type": "llama"})
        writer.write_text("chat/default.jinja", "{{ messages }}")
        writer.write_text(CARD, "# A card\n")
        files = hash_files(writer.partial)
        writer.write_json(REPORT, {"files": files, "other_files": inventory(writer.partial, [*files, REPORT])})
        writer.commit()
    return out


def content_of(folder: Path) -> dict[str, object]:
    """Everything below a folder: bytes of files, targets of links, None of folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else None
        if path.is_dir()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def plant(path: Path, kind: str) -> None:
    """Puts something of the user's at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.write_text("mine")


FOREIGN = {
    "thesis.docx": "file",
    ".git": "folder",
    ".cache/config": "file",
    "chat/own.jinja": "file",
    "id_rsa": "link",
    "model-00001-of-00002.safetensors": "file",
    f"{REPORT}.bak": "file",
}
RECORDS = {
    "hashes of all files": (REPORT, lambda files: {"files": files, "other_files": {CARD: "0" * 64}}),
    "hashes of the weights": (REPORT, lambda files: {"files": files}),
    "a training": ("heal.json", lambda files: {"files": {**files, CARD: None}}),
    "a healing": ("surgery_healing.json", lambda files: {"files": {**files, CARD: None}}),
}


class TestResults:
    @pytest.mark.parametrize("name", FOREIGN)
    def test_one_file_of_others_keeps_the_folder(self, tmp_path, name):
        out = write_result(tmp_path / "out")
        plant(out / name, FOREIGN[name])
        before = content_of(tmp_path)
        with pytest.raises(SurgeryError, match="contains files that surgery did not write") as error:
            write_result(out, overwrite=True)
        assert name.split("/")[0] in str(error.value) and content_of(tmp_path) == before

    @pytest.mark.parametrize("record", ["", "{}", "[1]", '{"files": 3}'])
    def test_without_a_record_the_folder_stays(self, tmp_path, record):
        out = write_result(tmp_path / "out")
        (out / REPORT).write_text(record)
        before = content_of(tmp_path)
        with pytest.raises(SurgeryError, match="contains files that surgery did not write"):
            write_result(out, overwrite=True)
        assert content_of(tmp_path) == before

    @pytest.mark.parametrize("record", RECORDS)
    def test_results_of_all_versions_are_replaced(self, tmp_path, record):
        out = write_result(tmp_path / "out")
        name, content = RECORDS[record]
        (out / REPORT).unlink()
        (out / name).write_text(json.dumps(content(hash_files(out))))
        (out / "config.json").unlink()  # also in part
        write_result(out, overwrite=True)
        assert (out / "config.json").exists() and os.listdir(tmp_path) == ["out"]

    @pytest.mark.parametrize("when", ["before the commit", "during the commit"])
    def test_a_file_that_appears_before_the_end(self, tmp_path, monkeypatch, when):
        out, staging, rename = write_result(tmp_path / "out"), Staging(tmp_path / "out", overwrite=True), os.rename
        staging.create()

        def late(source, target):
            if when == "during the commit" and Path(source) == out:
                (out / "notes.txt").write_text("mine")
            rename(source, target)

        monkeypatch.setattr(os, "rename", late)
        if when == "before the commit":
            (out / "notes.txt").write_text("mine")
            with pytest.raises(SurgeryError, match=r"notes\.txt"):
                staging.commit()
        else:
            with pytest.warns(UserWarning, match="could not be removed"):
                staging.commit()
        staging.discard()
        (notes,) = tmp_path.rglob("notes.txt")
        assert notes.read_text() == "mine" and out.is_dir() and not staging.partial.exists()


class TestWorkFolders:
    def test_only_what_a_run_wrote_is_removed(self, tmp_path):
        work = WorkFolder(tmp_path / "out.healing", ("heal.yaml", "trained"))
        work.open()
        for name in ("heal.yaml", "trained/config.json", "notes.txt"):
            plant(work.path / name, "file")
        work.open()
        work.clear()
        assert not (work.path / "trained").exists() and (work.path / "notes.txt").read_text() == "mine"
        assert not work.remove() and (work.path / "notes.txt").read_text() == "mine"
        (work.path / "notes.txt").unlink()
        assert work.remove() and not os.listdir(tmp_path)

    @pytest.mark.parametrize("kind", ["heal.yaml", "file", "link"])
    def test_a_folder_of_others_is_no_work_folder(self, tmp_path, kind):
        path = tmp_path / "out.healing"
        plant(path if kind in ("file", "link") else path / kind, kind)
        before = content_of(tmp_path)
        with pytest.raises(SurgeryError, match="not written by surgery"):
            WorkFolder(path, ("heal.yaml",)).open()
        assert content_of(tmp_path) == before


COMMANDS = {
    "plan, picture": (["plan", "{source}", "--kv-ratio", "0.5", "--plot", "{file}"], "a.png"),
    "plan": (["plan", "{source}", "--kv-ratio", "0.5", "--out", "{file}"], "plan.yaml"),
    "heads": (["heads", "{source}", "--out", "{file}"], "a.safetensors"),
    "heads, map": (["heads", "{source}", "--out", "{stem}.safetensors"], "a.png"),
    "export": (["export", "{source}", "--engine", "llama.cpp", "--out", "{file}"], "a.gguf"),
}


class TestFiles:
    @pytest.mark.parametrize("kind", ["file", "link"])
    @pytest.mark.parametrize("what", COMMANDS)
    def test_existing_files_and_links_stay(self, what, kind, checkpoints, tmp_path, monkeypatch, capsys):
        """Without --overwrite nothing that exists is replaced; links are not replaced with it either."""
        monkeypatch.chdir(tmp_path)
        command, name = COMMANDS[what]
        path = tmp_path / name
        plant(path, kind)
        before = content_of(tmp_path)
        paths = {"source": checkpoints("llama"), "file": path, "stem": path.with_suffix("")}
        command = [part.format(**paths) for part in command]
        for options in ([], *([["--overwrite"]] if kind == "link" else [])):
            code, _, error = run_main(monkeypatch, capsys, *command, *options)
            assert code == 1 and name in error and ("exists" in error or kind == "link"), error
            assert content_of(tmp_path) == before

    def test_pictures_replace_files_when_asked(self, tmp_path):
        path = Svg("<svg></svg>").save(tmp_path / "a.svg")
        with pytest.raises(SurgeryError, match="exists"):
            Svg("<p></p>").save(path)
        assert Svg("<p></p>").save(path, overwrite=True).read_text() == "<p></p>\n"

    def test_a_temporary_file_does_not_take_a_users_name(self, tmp_path):
        plant(tmp_path / "plan.yaml.partial", "file")
        plant(tmp_path / ".plan.yaml.surgery-partial", "link")
        with pytest.raises(SurgeryError):
            write_whole(tmp_path / "plan.yaml", "a: 1")
        (tmp_path / ".plan.yaml.surgery-partial").unlink()
        write_whole(tmp_path / "plan.yaml", "a: 1")
        assert content_of(tmp_path) == {"plan.yaml": b"a: 1", "plan.yaml.partial": b"mine"}

    @pytest.mark.parametrize("name", ["report.md", "report.csv", "report.json"])
    def test_a_published_report_replaces_only_an_earlier_one(self, tmp_path, name):
        plant(tmp_path / name, "file")
        with pytest.raises(SurgeryError, match="was not written by surgery"):
            write_report({"rows": []}, tmp_path)
        assert content_of(tmp_path) == {name: b"mine"}

    def test_a_folder_of_others_is_no_evaluation(self, tmp_path):
        plant(tmp_path / "eval" / "notes.txt", "file")
        with pytest.raises(SurgeryError, match="files other than an evaluation's"):
            ResultStore.open(tmp_path / "eval")


class TestNames:
    def test_an_evaluation_of_the_working_folder_lies_next_to_it(self, checkpoints, tmp_path, monkeypatch):
        from surgery.common.progress import Progress
        from surgery.evaluation.preparation import EvaluationRequest, prepare
        from surgery.evaluation.settings import EvalSettings

        source = shutil.copytree(checkpoints("llama"), tmp_path / "ckpt")
        settings = EvalSettings(tasks=("loss",), windows=2, length=64, decoded=0, variants=(), data=(str(HELD_OUT),))

        def out_of(*models: str, out: Path | None = None) -> Path:
            return prepare(EvaluationRequest(models, None, out, settings), Progress(silent=True)).out

        monkeypatch.chdir(source)
        assert out_of(".") == tmp_path / "ckpt-eval"
        assert out_of("../../x/../ckpt=.") == tmp_path / "x-..-ckpt-eval"
        with pytest.raises(SurgeryError, match="lies inside the checkpoint"):
            out_of(".", out=Path("eval"))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link").symlink_to("ckpt")
        assert out_of("ckpt") == Path("ckpt-eval") and out_of("link/") == Path("link-eval")

    @pytest.mark.parametrize("name", [".", "..", "../x", "/x", "a/b", ".hidden"])
    def test_a_recipe_names_no_folder_elsewhere(self, tmp_path, name):
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({"name": name, "steps": [{"convert": {"source": "builtin", "name": "a"}}]}))
        with pytest.raises(SurgeryError, match="must be a plain file name"):
            Recipe.read(path)

    @pytest.mark.parametrize("text", ["../../etc", "/", "..", "a\\..\\b", "a\n/b", "\x1b[31m", "é" * 300])
    def test_file_names_are_plain(self, text):
        name = file_name(text)
        assert Path(name).name == name and name.isprintable() and 0 < len(name) <= 80 and not name.startswith(".")

    def test_rows_are_called_as_their_folder(self, tmp_path, monkeypatch):
        (tmp_path / "ckpt" / "sub").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "ckpt" / "sub")
        assert [name_and_path(path)[0] for path in (".", "./", "..", "../")] == ["sub", "sub", "ckpt", "ckpt"]
