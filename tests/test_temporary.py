"""Temporary folders: gone with their block, their object or their process."""

import gc
import os
import subprocess
import sys
import tempfile

import pytest

from surgery.common.temporary import PREFIX, TemporaryFolder

STAYS = """
import sys
from surgery.common.temporary import TemporaryFolder
folder = TemporaryFolder("test")
(folder.path / "file").write_text("")
print(folder.path, flush=True)
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
