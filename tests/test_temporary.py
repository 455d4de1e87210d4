"""Temporary folders: gone with their process, or with the next one."""

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import kill_and_leave

from surgery.common.temporary import PREFIX, TemporaryFolder

STAYS = """
import sys, time
from surgery.common.temporary import TemporaryFolder
folder = TemporaryFolder("test")
(folder.path / "file").write_text("")
print(folder.path, flush=True)
time.sleep(60 * (len(sys.argv) > 1))
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_with_its_block_its_object_and_its_process(parent):
    with TemporaryFolder("test") as folder:
        assert (
            folder.parent == parent and os.listdir(parent) == [folder.name] and folder.name.startswith(f"{PREFIX}test-")
        )
    assert not os.listdir(parent)
    temporary = TemporaryFolder("test")
    del temporary
    gc.collect()
    assert not os.listdir(parent)
    subprocess.run([sys.executable, "-c", STAYS], check=True, capture_output=True)
    assert not os.listdir(parent)


def test_what_a_killed_process_left_goes_with_the_next_and_what_others_use_stays(parent):
    others = [
        subprocess.Popen([sys.executable, "-c", STAYS, "wait"], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = [Path(other.stdout.readline().strip()) for other in others]
    (parent / "surgery-mine").mkdir()
    try:
        kill_and_leave(others[0])
        assert (folders[0] / "file").exists()
        with TemporaryFolder("test"):
            assert not folders[0].exists() and (folders[1] / "file").exists()
    finally:
        others[1].terminate()
        for other in others:
            other.communicate()
    with TemporaryFolder("test"):
        pass
    assert os.listdir(parent) == ["surgery-mine"]


def test_what_others_made_under_such_a_name_stays(parent, monkeypatch):
    folder = parent / f"{PREFIX}thesis"
    folder.mkdir()
    (parent / "mine").mkdir()
    (parent / f"{PREFIX}link").symlink_to(parent / "mine")
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with TemporaryFolder("test"):
        pass
    monkeypatch.undo()
    assert folder.is_dir() and (parent / "mine").is_dir() and (parent / f"{PREFIX}link").is_symlink()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_anew(parent, monkeypatch):
    made, create = [], tempfile.mkdtemp

    def removed_once(**arguments):
        made.append(Path(create(**arguments)))
        if len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", removed_once)
    with TemporaryFolder("test") as folder:
        assert folder == made[1] and os.listdir(parent) == [folder.name]


def test_a_forked_child_leaves_it_to_its_parent(parent):
    folder = TemporaryFolder("test")
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.is_dir()
    folder.remove()
    assert not os.listdir(parent)
