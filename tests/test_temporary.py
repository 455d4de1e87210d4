"""Temporary folders: gone with their process, or with the next one."""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import kill_and_leave

from surgery.common.ownership import owner
from surgery.common.temporary import TemporaryFolder

STAYS = """
import sys, time
from surgery.common.ownership import owner
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
        assert folder.parent == parent and folder.name.startswith("surgery-test-") and len(os.listdir(parent)) == 2
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
    assert os.listdir(parent) == ["surgery-mine"]  # no folder without a lock is touched


MARKERS = {
    "empty": lambda folder: "",
    "of another program": lambda folder: json.dumps({**owner(folder=inode(folder)), "program": "other"}),
    "of another user": lambda folder: json.dumps({**owner(folder=inode(folder)), "user": -1}),
    "of another folder": lambda folder: json.dumps(owner(folder=[0, 0])),
    "damaged": lambda folder: json.dumps(owner(folder=inode(folder)))[:-3],
}


def inode(folder):
    return [folder.stat().st_dev, folder.stat().st_ino]


@pytest.mark.parametrize("kind", MARKERS)
def test_a_folder_with_a_users_lock_stays(parent, kind):
    """A user's folder called as ours are, and an unlocked file next to it (found by an attack, in no public thread)."""
    folder = parent / "surgery-thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("mine")
    (parent / "surgery-thesis.lock").write_text(MARKERS[kind](folder))
    with TemporaryFolder("test"):
        pass
    assert (folder / "chapter.tex").read_text() == "mine"
    assert (parent / "surgery-thesis.lock").exists() == (kind != "of another folder")


def test_a_forked_child_leaves_it_to_its_parent(parent):
    folder = TemporaryFolder("test")
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.is_dir() and len(os.listdir(parent)) == 2
    folder.remove()
    assert not os.listdir(parent)
