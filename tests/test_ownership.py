"""A file can only disappear if the user named its output with --overwrite and this program wrote it.

Rows of the matrix were found by attacks on 2026-11-25; none has a public thread.
"""

import contextlib
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from command_line import run_main
from tiny_models import HELD_OUT

from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.checkpoint.disk import write_whole
from surgery.checkpoint.file_hashes import CARD, REPORT, hash_files
from surgery.checkpoint.staging import MARKER, UNFINISHED, Staging
from surgery.checkpoint.work_folder import WorkFolder
from surgery.common.errors import SurgeryError
from surgery.common.file_names import file_name
from surgery.common.ownership import check_file, inventory, is_own_file, matching, nested, owner
from surgery.common.pictures import Page
from surgery.common.temporary import TemporaryFolder
from surgery.evaluation.names import name_and_path
from surgery.evaluation.store import ResultStore
from surgery.heads.pattern import HeadPattern
from surgery.healing import heal as healing
from surgery.planning.picture import save_figure
from surgery.training.run_folder import CHECKPOINT_FILES, RUN_FILES
from surgery.training.token_file import TokenFile
from surgery.workflow.recipe import Recipe

CASES = int(os.environ.get("SURGERY_CASES", "25"))


def write_result(out: Path, *, overwrite: bool = False, old: bool = False) -> Path:
    """A result as conversions write it; ``old``: of a version that did not list the card."""
    with CheckpointWriter(out, {"a": TensorSpec(torch.float32, (2,))}, overwrite=overwrite) as writer:
        writer.write("a", torch.ones(2))
        writer.write_json("config.json", {"model_type": "llama"})
        writer.write_text("chat/default.jinja", "{{ messages }}")
        writer.write_text(CARD, "# A card\n")
        report = {"files": hash_files(writer.partial)}
        if not old:
            report["other_files"] = inventory(writer.partial, [*report["files"], REPORT])
        writer.write_json(REPORT, report)
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
    elif kind == "folder with a file":
        path.mkdir()
        (path / "config").write_text("mine")
    else:
        path.write_text("mine")


FOREIGN = {
    "thesis.docx": "file",
    ".git": "folder",
    ".gitignore": "file",
    ".cache": "folder with a file",
    "chat/own.jinja": "file",
    "id_rsa": "link",
    "model-00001-of-00002.safetensors": "file",
    f"{REPORT}.bak": "file",
}


class TestResults:
    @pytest.mark.parametrize("name", FOREIGN)
    def test_one_file_of_others_keeps_the_folder(self, tmp_path, name):
        out = write_result(tmp_path / "out")
        plant(out / name, FOREIGN[name])
        before = content_of(tmp_path)
        with pytest.raises(SurgeryError, match="contains files that surgery did not write") as error:
            write_result(out, overwrite=True)
        assert name in str(error.value) and content_of(tmp_path) == before

    @pytest.mark.parametrize("name", [CARD, "config.json", "chat/default.jinja", REPORT])
    def test_an_edited_file_is_the_users(self, tmp_path, name):
        out = write_result(tmp_path / "out")
        (out / name).write_text("{} edited")
        before = content_of(tmp_path)
        with pytest.raises(SurgeryError, match="contains files that surgery did not write"):
            write_result(out, overwrite=True)
        assert content_of(tmp_path) == before

    @pytest.mark.parametrize("old", [False, True])
    def test_ones_own_are_replaced(self, tmp_path, old):
        out = write_result(tmp_path / "out", old=old)
        (out / "config.json").unlink()  # also in part
        write_result(out, overwrite=True)
        assert (out / "config.json").exists() and os.listdir(tmp_path) == ["out"]

    def test_a_file_that_appears_before_the_end(self, tmp_path):
        out, staging = write_result(tmp_path / "out"), Staging(tmp_path / "out", overwrite=True)
        staging.create()
        (out / "notes.txt").write_text("mine")
        with pytest.raises(SurgeryError, match=r"notes\.txt"):
            staging.commit()
        staging.discard()
        assert (out / "notes.txt").read_text() == "mine" and os.listdir(tmp_path) == ["out"]

    def test_a_folder_called_as_replaced_ones_are(self, tmp_path):
        backup = shutil.copytree(write_result(tmp_path / "out"), tmp_path / f"out.replaced-{os.getpid()}")
        before = content_of(backup)
        write_result(tmp_path / "out", overwrite=True)
        assert content_of(backup) == before and len(os.listdir(tmp_path)) == 2


class TestUnfinished:
    @pytest.mark.parametrize("subfolder", ["", f"{UNFINISHED}/", f"{UNFINISHED}/statistics/"])
    def test_a_file_of_others_in_a_leftover(self, tmp_path, subfolder):
        staging = Staging(tmp_path / "out", overwrite=False)
        staging.create()
        write_whole(staging.partial / "config.json", "{}")
        staging._unlock()
        plant(tmp_path / f"out.partial/{subfolder}notes.txt", "file")
        before = content_of(tmp_path)
        with pytest.raises(SurgeryError, match="which the unfinished run did not write"):
            Staging(tmp_path / "out", overwrite=True)
        assert content_of(tmp_path) == before

    def test_a_file_that_appears_while_it_is_written(self, tmp_path):
        for end in ("discard", "commit"):
            staging = Staging(tmp_path / end, overwrite=False)
            staging.create()
            (staging.partial / "notes.txt").write_text("mine")
            getattr(staging, end)()
        assert (tmp_path / "discard.partial" / "notes.txt").read_text() == "mine"
        assert (tmp_path / "commit" / "notes.txt").read_text() == "mine"

    def test_a_leftover_of_another_user(self, tmp_path):
        partial = tmp_path / "out.partial"
        partial.mkdir()
        (partial / MARKER).write_text(json.dumps({**owner(), "user": -1}) + '\n"config.json"\n')
        (partial / "config.json").write_text("{}")
        with pytest.raises(SurgeryError, match="which the unfinished run did not write"):
            Staging(tmp_path / "out", overwrite=True)

    def test_healing_from_scratch_keeps_files_of_others(self, tmp_path, checkpoints, monkeypatch, capsys):
        work, source = tmp_path / "out.healing", checkpoints("llama")
        WorkFolder(work, lambda: matching(())).open()
        (work / "notes.txt").write_text("mine")
        command = ["heal", source, "--teacher", source, "--data", HELD_OUT, "--max-steps", "1", "--restart"]
        code, _, error = run_main(monkeypatch, capsys, *command, "--out", tmp_path / "out")
        assert code == 1 and "notes.txt was not written by surgery" in error
        assert (work / "notes.txt").read_text() == "mine"

    def test_a_folder_of_others_is_no_work_folder(self, tmp_path):
        (tmp_path / "out.healing").mkdir()
        (tmp_path / "out.healing" / "heal.yaml").write_text("mine")
        with pytest.raises(SurgeryError, match="not written by surgery"):
            WorkFolder(tmp_path / "out.healing", lambda: matching(["heal.yaml"])).open()

    def test_a_temporary_file_does_not_take_a_users_name(self, tmp_path):
        (tmp_path / "plan.yaml.partial").write_text("mine")
        write_whole(tmp_path / "plan.yaml", "a: 1")
        assert content_of(tmp_path) == {"plan.yaml": b"a: 1", "plan.yaml.partial": b"mine"}


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
    def test_files_of_others_stay(self, what, kind, checkpoints, tmp_path, monkeypatch, capsys):
        """Without --overwrite nothing that exists is replaced; with it only what this program wrote."""
        monkeypatch.chdir(tmp_path)
        command, name = COMMANDS[what]
        path = tmp_path / name
        plant(path, kind)
        before = content_of(tmp_path)
        paths = {"source": checkpoints("llama"), "file": path, "stem": path.with_suffix("")}
        command = [part.format(**paths) for part in command]
        for options, words in (([], "exists"), (["--overwrite"], "")):
            code, _, error = run_main(monkeypatch, capsys, *command, *options)
            assert code == 1 and name in error and words in error, error
            assert content_of(tmp_path) == before

    @pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
    def test_pictures_carry_a_mark(self, tmp_path, kind):
        from matplotlib.figure import Figure

        path = save_figure(Figure(), tmp_path / f"a.{kind}")
        assert is_own_file(path)
        check_file(path, overwrite=True)
        with pytest.raises(SurgeryError, match="unknown file type; choose one of"):
            save_figure(Figure(), tmp_path / "a.jpg")

    def test_texts_carry_a_mark(self, tmp_path):
        path = Page("<html></html>").save(tmp_path / "a.html")
        with pytest.raises(SurgeryError, match="exists"):
            Page("<html></html>").save(path)
        assert Page("<html></html>").save(path, overwrite=True).read_text().startswith("<html></html>")

    @pytest.mark.parametrize("name", ["report.md", "report.csv", "report.json"])
    @pytest.mark.parametrize("recorded", [False, True])
    def test_a_report_replaces_no_file_that_was_edited(self, tmp_path, name, recorded):
        store = ResultStore.open(tmp_path)
        if recorded:
            (tmp_path / name).write_text("of surgery")
            store.record_files([tmp_path / name])
            store.check_files([name], "report.json")
        (tmp_path / name).write_text("mine")
        with pytest.raises(SurgeryError, match="was not written by surgery, or edited since"):
            store.check_files([name], "report.json")

    def test_an_earlier_versions_report_is_replaced(self, tmp_path):
        store = ResultStore.open(tmp_path)
        (tmp_path / "report.json").write_text('{"surgery_version": "0.1"}')
        (tmp_path / "report.md").write_text("of surgery")
        store.check_files(["report.json", "report.md", "report.csv"], "report.json")


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
        name = file_name(text, "row")
        assert Path(name).name == name and name.isprintable() and 0 < len(name) <= 80 and not name.startswith(".")

    def test_rows_are_called_as_their_folder(self, tmp_path, monkeypatch):
        (tmp_path / "ckpt" / "sub").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "ckpt" / "sub")
        assert [name_and_path(path)[0] for path in (".", "./", "..", "../")] == ["sub", "sub", "ckpt", "ckpt"]


def world(root: Path) -> list[Path]:
    """All kinds of what this program leaves; gives every folder that a run could touch."""
    write_result(root / "out")
    leftovers = Staging(root / "other", overwrite=False)
    leftovers.create()
    leftovers.claim("config.json", "chat/default.jinja")
    for name in (
        "config.json",
        "chat/default.jinja",
        f"{UNFINISHED}/forward.state",
        f"{UNFINISHED}/statistics/00000.pt",
    ):
        (leftovers.partial / name).parent.mkdir(exist_ok=True)
        (leftovers.partial / name).write_text("x")
    leftovers._unlock()
    work = healing_folder(root)
    work.open()
    run = work.path / "trained.run"
    names = ("heal.jsonl", "checkpoints/step-00000001/state.json", "data/tokens-0123456789abcdef/about.json")
    for path in (work.path / "heal.yaml", *(run / name for name in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    write_result(work.path / "trained")
    store = ResultStore.open(root / "eval")
    store.put("a" * 32, {})
    store.put("b" * 32, {})
    HeadPattern(torch.eye(2), "made").save(root / "pattern.safetensors")
    Page("x").save(root / "page.html")
    (root / "tmp").mkdir()
    return [root, *(path for path in root.rglob("*") if path.is_dir())]


def healing_folder(root: Path) -> WorkFolder:
    path = root / "out.healing"
    return WorkFolder(path, lambda: healing._owned(path))


def runs(root: Path):
    """Return the runs that touch these files, in one way or another."""
    yield lambda: write_result(root / "out", overwrite=True)
    yield lambda: write_result(root / "other", overwrite=True)
    yield lambda: write_result(root / "new", overwrite=True)
    yield lambda: [Staging(root / "other", overwrite=True)][0].create()
    yield healing_folder(root).open
    yield healing_folder(root).clear
    yield healing_folder(root).remove
    yield lambda: ResultStore.open(root / "eval").clear()
    yield lambda: ResultStore.open(root / "eval").put("a" * 32, {})
    yield lambda: HeadPattern(torch.ones(2, 2), "made").save(root / "pattern.safetensors", overwrite=True)
    yield lambda: Page("y").save(root / "page.html", overwrite=True)
    yield lambda: Page("y").save(root / "notes.html", overwrite=True)
    yield lambda: TokenFile.write(root / "out.healing/trained.run/data/tokens-0123456789abcdef", {}, [[1]])
    yield lambda: write_whole(root / "plan.yaml", "a: 1")
    yield lambda: TemporaryFolder("test").remove()


NAMES = ["notes.txt", ".hidden", ".git", "config.json.bak", "surgery-thesis", "surgery-thesis.lock", "notes.html"]
NAMES += ["plan.yaml.partial", "mla-everywhere.yaml", "new", "new.partial", "out.replaced-1", "out.replaced-1x"]
NAMES += ["report.md", "x.pt.txt", "results", "step-9", "é", "a b", "tokens", "model.bin.txt"]


@pytest.mark.parametrize("seed", range(CASES))
def test_whatever_is_planted_stays(seed, tmp_path, monkeypatch):
    """Files, hidden files, folders and links of the user's, everywhere a run could touch."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    chance, folders = random.Random(seed), world(tmp_path)
    planted = []
    for _ in range(chance.randint(1, 4)):
        path = chance.choice(folders) / chance.choice(NAMES)
        if not os.path.lexists(path):
            plant(path, chance.choice(["file", "file", "folder", "folder with a file", "link"]))
            planted.append(path)
    before = {path: content_of(path) if path.is_dir() and not path.is_symlink() else os.lstat(path) for path in planted}
    steps = list(runs(tmp_path))
    for step in chance.sample(steps, len(steps)):
        with contextlib.suppress(SurgeryError):
            step()
    for path in planted:
        assert os.path.lexists(path), path
        if isinstance(before[path], dict):
            assert before[path].items() <= content_of(path).items(), path
        else:
            assert (os.lstat(path).st_ino, os.lstat(path).st_mtime_ns) == (
                before[path].st_ino,
                before[path].st_mtime_ns,
            )


def test_runs_replace_and_remove_what_is_theirs(tmp_path, monkeypatch):
    """Run the same without anything planted: the test above would pass if nothing were ever removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    world(tmp_path)
    for step in (*list(runs(tmp_path))[:3], healing_folder(tmp_path).clear, healing_folder(tmp_path).remove):
        step()
    for step in list(runs(tmp_path))[7:12]:
        step()
    assert not list(tmp_path.glob("*.partial")) and not (tmp_path / "out.healing").exists()
    assert not list((tmp_path / "eval" / "results").glob("b*"))


def test_patterns():
    is_owned = nested(matching(["a.json"]), run=matching(RUN_FILES), states=matching(CHECKPOINT_FILES))
    state = "run/checkpoints/step-1/"
    for name in ("a.json", "run/", "run/data/", state, f"{state}state.json", "states/best/"):
        assert is_owned(name), name
    for name in ("b.json", "run", "run/notes.txt", "run/data/x/", f"{state}notes.txt", "states/x/state.json"):
        assert not is_owned(name), name


TEXT = "--calibration-tokens 256 --calibration-length 64"
WHOLE = {
    "convert": "convert {source} --to gqa --kv-heads 1 {text} --held-out 2 --out {out}",
    "slice": "slice {converted} --kv-ratio 0.3 --out {out}",
    "eval": "eval {source} --windows 2 --length 64 --tasks loss --decoded 4 --variants none --out {out}",
    "heads": "heads {source} --method induction --sinks 4 --window 16 --length 200 --facts 1 --samples 1"
    " --text {held_out} --out {out}.safetensors",
    "heal": "heal {source} --teacher {source} --data {held_out} --max-steps 1 --length 32 --held-out 2 --no-measure"
    " --out {out}",
    "plan": "plan {source} --kv-ratio 0.5 --allow quantized {text} --held-out 2 --recall 0 --context 256"
    " --out {out}.yaml --plot {out}.png",
    "export": "export {source} --engine llama.cpp --weights f32 --out {out}.gguf",
    "run": "run {recipe} --work {out}",
}
AGAIN = {"export": ["--overwrite"], "run": ["--restart"]}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("verb", WHOLE)
def test_whole_commands_leave_what_is_planted(verb, seed, checkpoints, tmp_path, monkeypatch, capsys):
    """Three runs: the first makes the output, the second replaces it, the third meets what was planted everywhere."""
    from healing import trained_here

    monkeypatch.setattr(healing, "run_interruptible", trained_here)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    root, chance = tmp_path / "outputs", random.Random(seed)
    root.mkdir()
    recipe, source = tmp_path / "recipe.yaml", checkpoints("llama")
    step = {"name": "half", "source": str(source), "kv_ratio": 0.5, "calibration": "none"}
    rows = {"name": "report", "checkpoints": ["half"], "tasks": ["loss"], "windows": 2, "length": 64, "decoded": 0}
    recipe.write_text(json.dumps({"steps": [{"convert": step}, {"eval": {**rows, "variants": []}}]}))
    paths = {"source": source, "recipe": recipe, "out": root / "out", "converted": tmp_path / "mla"}
    if "{converted}" in WHOLE[verb]:
        convert = ["convert", source, "--kv-ratio", "0.5", "--calibration", "none", "--carrier", "own"]
        assert run_main(monkeypatch, capsys, *convert, "--out", paths["converted"])[0] == 0
    command = WHOLE[verb].format(**paths, text=TEXT, held_out=HELD_OUT).split()
    again = AGAIN.get(verb, ["--overwrite", "--restart"])
    for options in ([], again):
        code, _, error = run_main(monkeypatch, capsys, *command, *options)
        assert code == 0, error
    planted = {}
    folders = [root, tmp_path / "tmp", *(path for path in root.rglob("*") if path.is_dir())]
    folders += [root / f"out.{kind}" for kind in ("partial", "healing", "yaml.statistics.partial")]
    for folder in folders:
        path = folder / chance.choice(NAMES)
        if not os.path.lexists(path) and chance.random() < 0.7:
            plant(path, chance.choice(["file", "folder", "folder with a file", "link"]))
            planted[path] = os.lstat(path).st_ino
    code, _, error = run_main(monkeypatch, capsys, *command, *again)
    assert code in (0, 1) and "Traceback" not in error
    for path, inode in planted.items():
        assert os.path.lexists(path) and os.lstat(path).st_ino == inode, (path, error)
