"""Pytest plugin that appends a row to the file of SURGERY_TESTS after each test."""

from __future__ import annotations

import json
import os


class Rows:
    """Writer of rows, active only in the controller of pytest-xdist."""

    def pytest_runtest_logreport(self, report) -> None:
        """Append the outcome, the duration and any error of a test."""
        if report.when != "call" and report.passed:
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        row |= dict(report.user_properties)
        if report.failed:
            row["error"] = str(report.longrepr)[-600:]
        with open(os.environ["SURGERY_TESTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config) -> None:
    """Register the writer, except in pytest-xdist workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows())
