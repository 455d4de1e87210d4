"""Reports next to a checkpoint that nobody meant well with: one line before any work, and never a traceback."""

import copy
import json
import shutil

import pytest
from hostile import taken_or_refused
from tiny_models import make_checkpoint

from surgery.api.rewriting import convert
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.evaluation.models import Checkpoint
from surgery.healing import heal
from surgery.healing.heal import HealRequest, heal_checkpoint
from surgery.reporting.report import Report, previous_report, read_report
from surgery.reporting.upload import prepare_upload
from surgery.structures.slices.settings import SliceSettings
from surgery.structures.slices.structure import Slice

STAGE = {
    "settings": {"train": "all", "learning_rate": 1e-4, "length": 8, "data": ["x.txt"], "objective": {"kl": 1.0}},
    "sequences_per_step": 2, "steps": 3, "tokens": 48, "seconds": 1.0, "processes": 1, "device": "cpu",
    "precision": "no", "earlier": [],
    "quality": [{"name": name, "loss": 2.0, "recall": None} for name in ("source", "converted", "healed")],
}  # fmt: skip


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    source = make_checkpoint(folder / "source", "llama")
    convert(source, to="lowrank", kv_ratio=0.5, calibration="none", out=folder / "converted")
    return folder / "converted"


@pytest.fixture(scope="module")
def report(converted):
    report = json.loads((converted / "surgery_report.json").read_text())
    return {**report, "healing": STAGE, "previous": copy.deepcopy(report)}


class Trained(Exception):
    """The training would begin."""


def begin(*arguments):
    raise Trained


def uses(folder):
    """Return the readers of the report, each up to the start of its work."""
    reader, settings = CheckpointReader.open(folder), SliceSettings(kv_ratio=0.3)

    def healing():
        try:
            heal_checkpoint(HealRequest(str(folder), overrides={"data": ["x.txt"]}, measure=None))
        except Trained:  # then the rest must go well, too
            heal._earlier(folder)
            again = read_report(folder)
            stage = {**STAGE, "earlier": heal._earlier(folder)}
            Report.of({**again, "healing": stage}).card("name")

    return {
        "read": lambda: read_report(folder),
        "push": lambda: prepare_upload(folder, "org/name"),
        "heal": healing,
        "slice": lambda: Slice(Slice.open(reader, settings), settings, Progress(silent=True)).forecast(),
        "eval": lambda: Checkpoint.open(str(folder)).conversion(),
        "inspect": lambda: previous_report(folder),
    }


@pytest.fixture
def untrained(monkeypatch):
    monkeypatch.setattr(heal, "_healed", begin)


EXAMPLES = {
    "source": "x", "target": [], "ladder": [{"stage": "x", "loss": "y", "recall": None}], "kv": {"ratio": None},
    "healing": {**STAGE, "quality": [{"name": "source", "loss": "2", "recall": None}]}, "settings": None,
    "calibration": 3, "layers": [{"energies": ["x"]}], "previous": {"source": {}}, "command": {"a": 1},
}  # fmt: skip


def check(folder, report):
    (folder / "surgery_report.json").write_text(json.dumps(report))
    for use in uses(folder).values():
        taken_or_refused(use)


@pytest.mark.parametrize("name", EXAMPLES)
def test_values_of_other_types(converted, report, untrained, name):
    check(converted, {**report, name: EXAMPLES[name]})
    check(converted, {key: value for key, value in report.items() if key != name})


def test_what_is_whole_is_taken(converted, report, untrained):
    (converted / "surgery_report.json").write_text(json.dumps(report))
    for use in uses(converted).values():
        use()


@pytest.mark.parametrize("value", ["x", {"quality": 3}, {**STAGE, "quality": [{"name": "healed"}]}])
def test_records_of_healings(converted, untrained, value):
    """The file that takes the report's place where a student was converted by others."""
    folder = converted.with_name("healed-before")
    shutil.copytree(converted, folder, dirs_exist_ok=True)
    (folder / "surgery_report.json").unlink()
    (folder / "surgery_healing.json").write_text(json.dumps(value))
    with pytest.raises(SurgeryError, match="surgery_healing"):
        heal_checkpoint(HealRequest(str(folder), overrides={"data": ["x.txt"], "teacher": str(folder)}, measure=None))
