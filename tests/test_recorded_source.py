"""`surgery heal` without --teacher: the source that the student's report names, if it is the same."""

import shutil

import pytest
from conversions import convert_checkpoint
from tiny_models import make_checkpoint

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.healing.heal import HealRequest, with_teacher
from surgery.healing.recorded_source import find_source
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A source, what it became, and what that became, each next to the others."""
    folder = tmp_path_factory.mktemp("converted")
    source = make_checkpoint(folder / "model", "llama")
    settings = KVHeadsSettings(kv_heads=1, method="mean-pool", calibration="none", device="cpu")
    merged = convert_checkpoint(source, None, settings).path
    streaming = HybridSettings(streaming=1.0, sinks=2, recent=6, calibration="none", device="cpu")
    return source, merged, convert_checkpoint(merged, None, streaming).path


@pytest.fixture
def copied(converted, tmp_path):
    """Copies of the three in a folder of one's own."""
    return [shutil.copytree(path, tmp_path / "copies" / path.name) for path in converted]


def test_the_first_source_is_found_next_to_it(converted):
    source, merged, hybrid = converted
    assert find_source(CheckpointReader.open(merged)) == source
    assert find_source(CheckpointReader.open(hybrid)) == source


def test_in_the_working_folder_too(copied, tmp_path, monkeypatch):
    source, merged, _ = copied
    here = tmp_path / "here"
    here.mkdir()
    shutil.move(source, here / "model")
    monkeypatch.chdir(here)
    assert find_source(CheckpointReader.open(merged)) == here / "model"


def test_the_nearest_where_the_first_is_gone(copied):
    source, merged, hybrid = copied
    shutil.rmtree(source)
    assert find_source(CheckpointReader.open(hybrid)) == merged


def test_another_model_of_that_name_is_not_taken(copied):
    source, merged, _ = copied
    shutil.rmtree(source)
    make_checkpoint(source, "llama", seed=1)
    with pytest.raises(SurgeryError, match=r"was made from model \(sha256 \w{12}\.\.\.\), which is neither"):
        find_source(CheckpointReader.open(merged))


def test_without_a_report_the_teacher_has_to_be_named(converted):
    with pytest.raises(SurgeryError, match="no report names its source; pass --teacher"):
        find_source(CheckpointReader.open(converted[0]))


def test_a_healing_takes_it_unless_something_else_is_said(converted, tmp_path):
    source, merged, _ = converted
    student, progress = CheckpointReader.open(merged), Progress(silent=True)

    def teacher(config=None, **settings):
        return with_teacher(HealRequest(str(merged), None, config, settings), student, progress).overrides.get(
            "teacher"
        )

    assert teacher() == teacher(length=64) == str(source)
    assert teacher(teacher="other") == "other"
    assert teacher(objective={"cross_entropy": 1.0}) is None and teacher(teacher_logits="logits") is None
    config = tmp_path / "heal.yaml"
    config.write_text("teacher: another\n")
    assert teacher(config) is None  # the file's own
    config.write_text("length: 64\n")
    assert teacher(config) == str(source)
