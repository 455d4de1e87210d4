"""The output folder appears whole or not at all, and nobody else's files are touched."""

import collections
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from surgery.checkpoint import CheckpointWriter, TensorSpec, check_output, parse_size
from surgery.checkpoint.file_hashes import REPORT
from surgery.checkpoint.output_path import default_output
from surgery.checkpoint.staging import MARKER
from surgery.common.errors import SurgeryError
from surgery.common.ownership import inventory

PLAN = {"a": TensorSpec(torch.float32, (2,))}
FILES = ["config.json", "model.safetensors", REPORT]


def write(out, value: float = 1.0, **options):
    with CheckpointWriter(out, PLAN, **options) as writer:
        writer.write("a", torch.full((2,), value))
        writer.write_json("config.json", {"value": value})
        writer.write_json(REPORT, {"files": inventory(writer.partial)})
        writer.commit()
    return out


def leave(partial: Path, name: str, content: bytes = b"x") -> None:
    """Makes what a killed run leaves: a marker and a file."""
    (partial / name).parent.mkdir(parents=True)
    (partial / MARKER).touch()
    (partial / name).write_bytes(content)


def refused(out, words: str, **options) -> None:
    with pytest.raises(SurgeryError) as caught:
        CheckpointWriter(out, PLAN, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class TestExistingOutput:
    def test_refused_without_overwrite(self, tmp_path, disk):
        out = write(tmp_path / "out")
        before = disk()
        refused(out, "exists; choose another --out or pass --overwrite")
        assert disk() == before

    def test_overwrite(self, tmp_path):
        out = write(tmp_path / "out")
        write(out, 2.0, overwrite=True)
        assert "2.0" in (out / "config.json").read_text()
        assert sorted(os.listdir(tmp_path)) == ["out"]
        assert sorted(os.listdir(out)) == FILES

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_an_empty_folder_is_taken(self, tmp_path, overwrite):
        (tmp_path / "out").mkdir()
        write(tmp_path / "out", overwrite=overwrite)
        assert sorted(os.listdir(tmp_path)) == ["out"]
        assert sorted(os.listdir(tmp_path / "out")) == FILES

    def test_a_file_stays(self, tmp_path, disk):
        (tmp_path / "file").write_text("x")
        before = disk()
        refused(tmp_path / "file", "is a file", overwrite=True)
        assert disk() == before

    def test_link_to_a_folder(self, tmp_path):
        write(tmp_path / "real")
        (tmp_path / "link").symlink_to("real")
        write(tmp_path / "link", 2.0, overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert "2.0" in (tmp_path / "real" / "config.json").read_text()

    @pytest.mark.parametrize("exists", [True, False])
    @pytest.mark.parametrize(
        ("error", "expected"),
        [(OSError(5, "Input/output error"), SurgeryError), (KeyboardInterrupt(), KeyboardInterrupt)],
    )
    def test_failed_rename_restores(self, tmp_path, disk, monkeypatch, error, expected, exists):
        if exists:
            write(tmp_path / "out")
        before, rename = disk(), os.rename

        def failing(source, target):
            if str(source).endswith(".partial"):
                raise error
            rename(source, target)

        monkeypatch.setattr(os, "rename", failing)
        with pytest.raises(expected, match=r"Input/output error|^$"):
            write(tmp_path / "out", 2.0, overwrite=True)
        assert disk() == before

    def test_old_output_that_cannot_be_removed(self, tmp_path, monkeypatch):
        out = write(tmp_path / "out")

        monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)
        with pytest.warns(UserWarning, match="could not be removed"):
            write(out, 2.0, overwrite=True)
        assert "2.0" in (out / "config.json").read_text()


class TestLeftovers:
    def test_ours_is_removed(self, tmp_path):
        leave(tmp_path / "out.partial", "sub/old")
        write(tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["out"]
        assert sorted(os.listdir(tmp_path / "out")) == FILES

    def test_the_constructor_leaves_it(self, tmp_path, disk):
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial" / MARKER).write_text("")
        before = disk()
        CheckpointWriter(tmp_path / "out", PLAN)
        assert disk() == before

    def test_empty_one_is_removed(self, tmp_path):
        (tmp_path / "out.partial").mkdir()
        write(tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["out"]

    @pytest.mark.parametrize("kind", ["folder", "file", "link"])
    def test_others_are_refused(self, tmp_path, disk, kind):
        partial = tmp_path / "out.partial"
        if kind == "folder":
            partial.mkdir()
            (partial / "theirs").write_text("x")
        elif kind == "file":
            partial.write_text("x")
        else:
            (tmp_path / "elsewhere").mkdir()
            partial.symlink_to("elsewhere")
        before = disk()
        refused(tmp_path / "out", "not written by surgery")
        assert disk() == before

    def test_theirs_that_appears_after_the_constructor_stays(self, tmp_path, disk):
        writer = CheckpointWriter(tmp_path / "out", PLAN)
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial" / "theirs").write_text("x")
        before = disk()
        with pytest.raises(SurgeryError, match="not written by surgery"), writer:
            pass
        assert disk() == before

    def test_one_that_is_being_written_is_refused(self, tmp_path):
        late = CheckpointWriter(tmp_path / "out", PLAN)
        with CheckpointWriter(tmp_path / "out", PLAN) as writer:
            refused(tmp_path / "out", "another surgery process is writing it")
            with pytest.raises(SurgeryError, match="another surgery"), late:
                pass
            writer.write("a", torch.ones(2))
            writer.commit()
        assert (tmp_path / "out" / "model.safetensors").exists()

    def test_killed_process(self, tmp_path):
        """A lock dies with its process, so what SIGKILL leaves is cleared by the next run."""
        child = os.fork()
        if child == 0:
            CheckpointWriter(tmp_path / "out", PLAN).__enter__()
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert (tmp_path / "out.partial" / MARKER).exists()
        write(tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["out"]


class TestSpace:
    Usage = collections.namedtuple("Usage", "total used free")

    def test_too_full(self, tmp_path, disk, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: self.Usage(10**9, 0, 10**8))
        before = disk()
        plan = {"a": TensorSpec(torch.float32, (2 * 10**7,))}
        with pytest.raises(SurgeryError, match=r"needs 137.3 MiB, the disk has 95.4 MiB free"):
            CheckpointWriter(tmp_path / "not" / "yet" / "out", plan)
        assert disk() == before

    def test_a_leftover_counts_as_free(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: self.Usage(10**9, 0, 64 * 10**6))
        refused(tmp_path / "out", "the disk has")
        leave(tmp_path / "out.partial", "model.safetensors", b"x" * 10_000)
        CheckpointWriter(tmp_path / "out", PLAN)


class TestCheckOutput:
    @pytest.mark.parametrize("out", ["ckpt", "ckpt/", "other/../ckpt", "ckpt/out", "ckpt/a/b", "link", "link/out", "."])
    def test_refused(self, tmp_path, monkeypatch, out):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "ckpt").mkdir()
        (tmp_path / "link").symlink_to("ckpt")
        with pytest.raises(SurgeryError, match="choose another --out"):
            check_output(tmp_path / "ckpt", out)

    def test_partial_next_to_it(self, tmp_path):
        with pytest.raises(SurgeryError, match="choose another --out"):
            check_output(tmp_path / "x.partial", tmp_path / "x")

    def test_allowed(self, tmp_path):
        check_output(tmp_path / "ckpt", tmp_path / "ckpt-mla")
        check_output(tmp_path / "ckpt", tmp_path / "other" / "ckpt")


def test_outputs_lie_next_to_what_they_are_made_of(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    assert default_output("../link", "mla") == Path("../link-mla")  # not next to what the link leads to
    assert default_output(".", "mla") == tmp_path / "real-mla"
    assert default_output("org/name", "mla") == Path("name-mla")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1kb", 1000), ("2GiB", 2**31), ("3MiB", 3 * 2**20), ("4KiB", 4096),
        ("1.5GB", 1_500_000_000), ("1.5 mb", 1_500_000), ("1000", 1000), (1000, 1000), ("7B", 7), ("1TB", 10**12),
    ],
)  # fmt: skip
def test_parse_size(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "5 G", "five GB", "-1GB", "0", 0, -3, "1.2.3MB", "5GBs", None, "."])
def test_parse_size_refuses(text):
    with pytest.raises(SurgeryError, match=r"^memory .* is not a size; write it like 5GB"):
        parse_size(text, "memory")


def test_root_is_no_output():
    refused("/", "cannot be an output folder")
