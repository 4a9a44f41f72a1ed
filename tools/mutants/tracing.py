"""Records which test executes which line: a plugin of pytest, and a module for other processes of a test (site/).

Every process writes a data file of coverage below ``MUTANTS_TRACES``, with tests as contexts. A test's name reaches its
processes in a file, since a server that forks ranks keeps the environment of the test that started it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

_FOLDER = "MUTANTS_TRACES"
_SOURCE = "MUTANTS_SOURCE"
_NAME = "MUTANTS_TEST"
_CASES = "MUTANTS_CASES"


def _started(context: str) -> coverage.Coverage:
    found = coverage.Coverage(
        data_file=str(Path(os.environ[_FOLDER]) / "trace"),
        data_suffix=True,
        config_file=False,
        include=[f"{os.environ[_SOURCE]}/*"],
        messages=False,
    )
    found.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "module-not-measured"])
    found.start()
    found.switch_context(context)
    return found


def _ended(tracer: coverage.Coverage) -> None:
    tracer.stop()
    tracer.save()


class _Tests:
    """Traces the tests of this process."""

    def __init__(self) -> None:
        self._file = Path(os.environ[_FOLDER]) / f"{os.getpid()}.test"
        os.environ[_NAME] = str(self._file)
        self._tracer = _started("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._file.write_text(item.nodeid)
        self._tracer.switch_context(item.nodeid)
        result = yield
        self._tracer.switch_context("")
        return result

    def pytest_sessionfinish(self) -> None:
        _ended(self._tracer)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects evenly spaced cases of a test with many cases."""
    cases = dict[str, list[pytest.Item]]()
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    most = int(os.environ[_CASES])
    kept = [item for found in cases.values() for item in found[:: -(-len(found) // most)]]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Tests())


def trace_process() -> None:
    """Traces this process for the test that started it; in a server that forks, traces its children instead."""
    from multiprocessing.process import BaseProcess

    if not any("multiprocessing" in word for word in sys.orig_argv):
        tracer = _started(Path(os.environ[_NAME]).read_text())
        atexit.register(_ended, tracer)
        return
    bootstrap = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def traced(self: BaseProcess, *arguments: Any, **options: Any) -> Any:
        tracer = _started(Path(os.environ[_NAME]).read_text())
        try:
            return bootstrap(self, *arguments, **options)
        finally:
            _ended(tracer)

    BaseProcess._bootstrap = traced  # type: ignore[attr-defined]
