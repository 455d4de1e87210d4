"""A conversion to which something happens: what it says, and what it leaves."""

import hashlib
import shutil
import tempfile

import pytest
from command_line import listing, run_main


class Conversion:
    """`surgery convert` of a tiny checkpoint in this process, with a folder of its own for temporary files."""

    def __init__(self, source, folder, monkeypatch, capsys):
        self.folder, self.source, self.out = folder, shutil.copytree(source, folder / "source"), folder / "out"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        self._monkeypatch, self._capsys, self._before = monkeypatch, capsys, self.source_content()

    def run(self, *arguments):
        """Exit code, and the lines on standard error."""
        request = ("convert", self.source, "--out", self.out, "--calibration", "none", "--kv-ratio", "0.5", *arguments)
        ended, out, err = run_main(self._monkeypatch, self._capsys, *request)
        assert "Traceback" not in err and (ended == 0 or out == "")
        return ended, err.splitlines()

    def source_content(self):
        return {name: hashlib.sha256((self.source / name).read_bytes()).hexdigest() for name in listing(self.source)}

    def check_nothing_left(self, *, source=True):
        assert sorted(path.name for path in self.folder.iterdir()) == ["source", "temporary"][1 - source :]
        assert not list(self.temporary.iterdir())
        assert not source or self.source_content() == self._before


@pytest.fixture
def conversion(checkpoints, tmp_path, monkeypatch, capsys):
    return Conversion(checkpoints("llama"), tmp_path, monkeypatch, capsys)
