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
    """A report of few plots, each of which takes a second."""
    report = sample_report(rows=1)
    report["rows"][0]["results"] = {"loss": report["rows"][0]["results"]["loss"]}
    return report


@pytest.mark.parametrize(("suffix", "before"), [("html", True), ("csv", False), ("json", True), ("json", False)])
def test_a_disk_that_fills(suffix, before, tmp_path, monkeypatch):
    """A full disk left page, table and text without their JSON."""
    report, names = short_report(), [f"report.{name}" for name in ("html", "md", "csv", "json")]
    earlier = json.dumps({"surgery_version": "0.1.0"})  # by which its files are known to be of this program
    for name in names if before else ():
        (tmp_path / name).write_text(earlier)
    real, table = Path.write_text, open

    def full(path, *arguments, **options):
        if f"report.{suffix}" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *arguments, **options)

    def full_table(path, *arguments, **options):
        if suffix == "csv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return table(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("surgery.common.tables.csv_file.open", full_table, raising=False)
    with pytest.raises(SurgeryError, match=f"report.{suffix}"):
        write_report(report, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == (sorted(names) if before else [])
    assert all(path.read_text() == earlier for path in tmp_path.iterdir())


def test_all_files(tmp_path):
    report = short_report()
    files = write_report(report, tmp_path)
    assert sorted(files) == sorted(tmp_path.iterdir()) and files[0].name == "report.json"
    assert disk.read_json(files[0]) == report
