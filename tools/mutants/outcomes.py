"""A plugin of pytest that writes the begin and the outcome of each test at once, since a run may die."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

import pytest

FILE = "MUTANTS_OUTCOMES"


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w")

    def _write(self, test: str, outcome: str, seconds: float = 0.0, why: str = "") -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "seconds": seconds, "why": why}) + "\n")
        self._file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report.nodeid, report.outcome, report.duration, "" if report.passed else _last_line(report))
        if report.when == "teardown":
            self._write(report.nodeid, "ended")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid or "conftest.py", "failed", why=_last_line(report))


def _last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")] or [""]
    return lines[0][1:].strip()[:300]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(Path(os.environ[FILE])))
