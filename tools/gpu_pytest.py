"""A plugin of pytest: appends a row a test to the file that SURGERY_TESTS names, as soon as the test has ended."""

from __future__ import annotations

import json
import os


class Rows:
    """Writes rows in the process that reports, also where several run the tests."""

    def pytest_runtest_logreport(self, report) -> None:
        """Append what pytest has seen of a test."""
        if report.when != "call" and report.passed:
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        row |= dict(report.user_properties)
        if report.failed:
            row["error"] = str(report.longrepr)[-600:]
        with open(os.environ["SURGERY_TESTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config) -> None:
    """Leave workers to the process that they report to."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows())
