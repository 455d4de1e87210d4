"""The files of a report: all of them, or those that were there before."""

import errno
import json
import os
from pathlib import Path

import pytest
from sample_report import sample_report

from surgery.checkpoint import disk
from surgery.common.errors import SurgeryError
from surgery.evaluation.output import write_report


def short_report():
    """A report of one plot, which takes a second."""
    report = sample_report(rows=1)
    report["rows"][0]["results"] = {"loss": report["rows"][0]["results"]["loss"]}
    return report


OLD = ("report.html", "report.csv", "speed.svg")


@pytest.mark.parametrize(
    ("file", "before"), [("report.md", True), ("loss-by-position.svg", False), ("report.json", True)]
)
def test_a_disk_that_fills(file, before, tmp_path, monkeypatch):
    """A full disk left plots and text without their JSON."""
    names = ["report.json", "report.md", *OLD]
    earlier = json.dumps({"surgery_version": "0.1.0"})  # by which its files are known to be of this program
    for name in names if before else ():
        (tmp_path / name).write_text(earlier)
    real = Path.write_text

    def full(path, *arguments, **options):
        if file in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SurgeryError, match=file):
        write_report(short_report(), tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == (sorted(names) if before else [])
    assert all(path.read_text() == earlier for path in tmp_path.iterdir())


def test_a_report_replaces_all_files_of_an_earlier_version(tmp_path):
    report = short_report()
    for name in ("report.json", *OLD):
        (tmp_path / name).write_text(json.dumps({"surgery_version": "0.1.0"}))
    files = write_report(report, tmp_path)
    assert [path.name for path in files] == ["report.json", "report.md", "loss-by-position.svg"]
    assert sorted(files) == sorted(tmp_path.iterdir()) and disk.read_json(files[0]) == report
