"""A plugin of pytest: appends a row a test to the file that SURGERY_TESTS names, as soon as the test has ended."""

from __future__ import annotations

import json
import os


def pytest_runtest_logreport(report) -> None:
    """Called in the process that reports, also where several run the tests."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.failed:
        row["error"] = str(report.longrepr)[-600:]
    with open(os.environ["SURGERY_TESTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
