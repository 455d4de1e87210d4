"""A conversion that was killed goes on, and ends in the same bits as one that was not."""

import os
import shutil
import signal

import pytest
from conversions import convert_checkpoint, results
from processes import AT_ONCE, Fork
from tiny_models import HELD_OUT

from surgery.checkpoint import CheckpointReader, snapshots
from surgery.checkpoint.staging import MARKER, UNFINISHED
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.structures import converter
from surgery.structures.registry import find_target

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 2}
KINDS = {
    "mla": {"kv_ratio": 0.5},
    "gqa": {"kv_heads": 1},
    "lowrank": {"kv_ratio": 0.5, "window": 8},
    "crosslayer": {"group_size": 2},
}
KINDS_TRIED = ["crosslayer", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "crosslayer")]


def settings_of(kind, **others):
    settings = {**TEXT, **KINDS[kind], **others}
    return find_target(kind).settings({name: value for name, value in settings.items() if value is not None})


def content_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Stopped(KeyboardInterrupt):
    """Not one of a person at the keyboard, which pytest would take for its own end."""


@pytest.fixture
def stops(monkeypatch):
    """Every state is kept, and a number of them stop the process: gives the names of those that were."""
    original, leftovers = [], [None]
    take = snapshots.Snapshots.take

    def stop(self, loop, state):
        take(self, loop, state)
        original.append(loop)
        if leftovers[0] is not None:
            leftovers[0] -= 1
            if not leftovers[0]:
                raise Stopped

    monkeypatch.setattr(snapshots, "INTERVAL", 0.0)
    monkeypatch.setattr(snapshots.Snapshots, "take", stop)

    def after(count):
        original.clear()
        leftovers[0] = count
        return original

    return after


@pytest.mark.parametrize("kind", KINDS_TRIED)
def test_stopped_after_every_state(kind, checkpoints, tmp_path, stops):
    source, settings = checkpoints("llama"), settings_of(kind)
    states = stops(None)
    convert_checkpoint(source, tmp_path / "whole" / "small", settings)
    whole, total, records = results(tmp_path / "whole" / "small"), len(states), set(states)
    assert records == {"forward", "backward", "statistics"} | {"layers"}
    partial = tmp_path / "again" / "small.partial"
    for run in range(total + 1):
        stops(1)
        if run == total:
            convert_checkpoint(source, tmp_path / "again" / "small", settings)
            break
        with pytest.raises(Stopped):
            convert_checkpoint(source, tmp_path / "again" / "small", settings)
        assert set(os.listdir(partial)) == {UNFINISHED, MARKER} and os.listdir(partial.parent) == [partial.name]
    assert results(tmp_path / "again" / "small") == whole
    assert os.listdir(tmp_path / "again") == ["small"]


def test_other_work_keeps_what_is_there_until_restart(checkpoints, tmp_path, stops, capsys):
    """A mistyped flag discarded the work of hours (found by an attack, in no public thread)."""
    source, out = checkpoints("llama"), tmp_path / "small"
    stops(3)
    with pytest.raises(Stopped):
        convert_checkpoint(source, out, settings_of("gqa"))
    before = content_of(tmp_path)
    with pytest.raises(SurgeryError, match=r"unfinished work with another text, seed 0, not 1;.*--restart"):
        convert_checkpoint(source, out, settings_of("gqa", seed=1))
    assert content_of(tmp_path) == before
    states = stops(1)
    with pytest.raises(Stopped):
        convert_checkpoint(source, out, settings_of("gqa", seed=1), restart=True)
    assert states == ["forward"]
    stops(None)
    convert_checkpoint(source, out, settings_of("gqa", seed=1), progress=Progress())
    assert "resuming from" in capsys.readouterr().err


def change(path, back=False):
    """Flips a bit in the middle of a file; with ``back`` sets its time back."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if back:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def own_source(checkpoints, tmp_path):
    """A copy to be touched."""
    return shutil.copytree(checkpoints("llama"), tmp_path / "source")


@pytest.fixture
def read(monkeypatch):
    """Record where the source was whenever all of its weights were read."""
    hashed, paths = CheckpointReader._hashed, []
    monkeypatch.setattr(CheckpointReader, "_hashed", lambda self, *of: paths.append(self.path) or hashed(self, *of))
    return paths


@pytest.fixture(scope="module")
def whole(checkpoints, tmp_path_factory):
    """Return a conversion that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "small"
    convert_checkpoint(checkpoints("llama"), out, settings_of("gqa"))
    return results(out)


@pytest.mark.parametrize("how", ["as it was", "touched", "copied", "changed"])
def test_a_source_is_known_by_its_content(how, own_source, whole, tmp_path, stops, capsys, read):
    source, out, settings = own_source, tmp_path / "small", settings_of("gqa")
    stops(3)
    with pytest.raises(Stopped):
        convert_checkpoint(source, out, settings)
    assert len(read) == 1
    if how == "touched":
        os.utime(source / "model.safetensors")
    elif how == "copied":
        source = shutil.copytree(source, tmp_path / "copy")
    elif how != "as it was":
        change(source / "model.safetensors", back=True)
    read.clear()
    states, same = stops(None), how != "changed"
    if not same:
        with pytest.raises(SurgeryError, match="unfinished work with another source"):
            convert_checkpoint(source, out, settings)
        assert len(read) == 1 and states == []
    convert_checkpoint(source, out, settings, restart=not same, progress=Progress())
    assert ("resuming from" in capsys.readouterr().err) == same
    assert states[0] == ("statistics" if same else "forward")
    assert len(read) == (0 if how == "as it was" else 1 if same else 2)
    assert (results(out) == whole) == same


@pytest.mark.parametrize("kind", ["touched", "changed"])
def test_a_source_that_changes_meanwhile(kind, own_source, tmp_path, monkeypatch):
    finish, weights = converter._finish, own_source / "model.safetensors"

    def meanwhile(*of):
        result = finish(*of)
        os.utime(weights) if kind == "touched" else change(weights)
        return result

    monkeypatch.setattr(converter, "_finish", meanwhile)
    if kind == "touched":
        convert_checkpoint(own_source, tmp_path / "small", settings_of("gqa"))
        return
    with pytest.raises(SurgeryError, match="was changed while it was read"):
        convert_checkpoint(own_source, tmp_path / "small", settings_of("gqa"))
    assert os.listdir(tmp_path) == ["source"]


def test_a_damaged_state_is_refused_until_restart(checkpoints, tmp_path, stops):
    source, out = checkpoints("llama"), tmp_path / "small"
    stops(4)
    with pytest.raises(Stopped):
        convert_checkpoint(source, out, settings_of("gqa"))
    path = tmp_path / "small.partial" / UNFINISHED / "statistics.state"
    path.write_bytes(path.read_bytes()[:-3])
    stops(None)
    with pytest.raises(SurgeryError, match="--restart") as error:
        convert_checkpoint(source, out, settings_of("gqa"))
    assert error.value.path == path
    convert_checkpoint(source, out, settings_of("gqa"), restart=True)


def test_a_resumed_run_that_fails_keeps_what_is_there(checkpoints, tmp_path, stops, monkeypatch):
    """No space on the disk, after SIGKILL (found by an attack, in no public thread)."""
    source, out, usage = checkpoints("llama"), tmp_path / "small", shutil.disk_usage
    stops(3)
    with pytest.raises(Stopped):
        convert_checkpoint(source, out, settings_of("gqa"))
    states = stops(None)
    entries = {path: content for path, content in content_of(tmp_path).items() if path.suffix in (".state", ".pt")}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10**6))
        with pytest.raises(SurgeryError, match=r"the disk has \d+.\d KiB free"):
            convert_checkpoint(source, out, settings_of("gqa"))
    assert entries and entries.items() <= content_of(tmp_path).items() and states == []
    convert_checkpoint(source, out, settings_of("gqa"))
    assert "forward" not in states and os.listdir(tmp_path) == ["small"]


# Where a folder with statistics is removed, one of them goes, and then the process.
KILLED = f"""
import os, shutil, signal
from pathlib import Path
whole = shutil.rmtree

def remove(path, *arguments, **options):
    for file in sorted(Path(path).rglob("00000.pt")):
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(path, *arguments, **options)

shutil.rmtree = remove
{AT_ONCE}"""


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_kept_is_no_longer_there_once_a_part_of_it_is_removed(restart, checkpoints, tmp_path, stops):
    """Killed at the end, where what was kept goes before the output gets its name, or where it has to begin again."""
    source, out = checkpoints("llama"), tmp_path / "again" / "small"
    convert_checkpoint(source, tmp_path / "whole" / "small", settings_of("lowrank"))
    if restart:
        stops(3)
        with pytest.raises(Stopped):
            convert_checkpoint(source, out, settings_of("lowrank"))
    verb = ["convert", source, "--to", "lowrank", "--out", out, "--kv-ratio", 0.5, "--window", 8]
    verb += ["--calibration", HELD_OUT, "--calibration-tokens", 256, "--calibration-length", 64, "--held-out", 2]
    killed = Fork(*verb, *(["--restart"] if restart else []), code=KILLED)
    assert killed.wait() == -signal.SIGKILL, killed.stderr
    assert os.listdir(out.parent) == ["small.partial"]
    stops(None)
    convert_checkpoint(source, out, settings_of("lowrank"))
    assert results(out) == results(tmp_path / "whole" / "small")
    assert os.listdir(out.parent) == ["small"] and not [path for path in os.listdir(out) if path.startswith(".")]
