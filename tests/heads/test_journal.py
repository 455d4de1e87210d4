"""Journal: its state is there when it is opened again, and nothing else is."""

import signal

import pytest
import torch
from processes import Fork
from safetensors.torch import save_file

from surgery.common.errors import SurgeryError
from surgery.heads.journal import Journal

IDENTITY = {"model": "a", "seed": 3, "sizes": (1, 2)}
KILLED = """
import os, signal, sys
from pathlib import Path
Path.replace = lambda self, other: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "heads.journal"
    journal = Journal(path, IDENTITY)
    assert journal.get() is None and not path.exists()
    state = {"gates": torch.rand(2, 3, dtype=torch.float64), "done": torch.tensor(7), "empty": torch.zeros(0)}
    journal.put({"other": torch.ones(1)})
    journal.put(state)
    again = Journal(path, IDENTITY)
    assert again.get().keys() == state.keys() and again.seconds > 0
    assert all(torch.equal(again.get()[name], tensor) for name, tensor in state.items())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again.remove()
    assert again.get() is None and not path.exists()


def test_what_a_killed_write_left_goes_with_the_next(tmp_path):
    write = f"{KILLED}\nfrom surgery.heads.journal import Journal\nJournal(Path(sys.argv[1]), {{}}).put({{}})"
    assert Fork(tmp_path / "journal", code=write).wait() == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    Journal(tmp_path / "journal", {}).put({})
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]


def test_keeps_copies_and_without_a_file_what_it_was_told(tmp_path):
    tensor = torch.zeros(3, 2)
    journal = Journal(tmp_path / "journal", {})
    journal.put({"x": tensor.T})
    tensor += 1
    assert journal.get()["x"].sum() == 0
    journal = Journal(None, {})
    journal.put({"x": torch.ones(1)})
    assert journal.get()["x"] == 1
    journal.remove()


def test_another_identity_keeps_what_is_there_until_restart(tmp_path):
    """Seen in no thread: a mistyped flag discarded the work of hours."""
    path = tmp_path / "journal"
    Journal(path, IDENTITY).put({"x": torch.ones(1)})
    with pytest.raises(SurgeryError, match="--restart"):
        Journal(path, {**IDENTITY, "seed": 4})
    assert Journal(path, IDENTITY).get() is not None
    Journal(path, {**IDENTITY, "seed": 4}, restart=True).put({"x": torch.ones(1)})
    with pytest.raises(SurgeryError, match="--restart"):
        Journal(path, IDENTITY)


@pytest.mark.parametrize("damage", ["bytes", "truncated", "foreign", "folder"])
def test_refuses_what_is_no_journal(tmp_path, damage):
    path = tmp_path / "journal"
    Journal(path, {}).put({"x": torch.ones(100)})
    if damage == "bytes":
        path.write_bytes(b"something else")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "foreign":
        save_file({"weight": torch.ones(2)}, path, {"format": "pt"})
    else:
        path.unlink()
        path.mkdir()
    for restart in (False, True):
        with pytest.raises(SurgeryError) as error:
            Journal(path, {}, restart=restart)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        assert path.exists()


def test_only_the_main_process_touches_the_file(tmp_path):
    path, calls = tmp_path / "journal", []

    class Other:
        """A process that is not the main one: what main reads is handed to it."""

        def from_main(self, function):
            calls.append(function.__name__)
            return {"identity": {}, "seconds": 1.0, "state": {"x": torch.ones(1)}} if len(calls) == 1 else None

    journal = Journal(path, {}, Other())
    journal.put({"x": torch.ones(1)})
    assert journal.get()["x"] == 1 and calls == ["_read", "_write"] and not path.exists()
