"""Runs tests against a copy of the package.

Each run forks a process that has imported slow libraries, and no module of the package: on a busy machine the imports
would take longer than the tests. Each run has its own process group, folder and time limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mutants import outcomes

_IMPORTED_ONCE = (
    "pytest",
    "_pytest.assertion.rewrite",
    "torch",
    "torch.distributed",
    "transformers",
    "peft",
)
_MOST_BYTES = 12 * 2**30  # memory of one process, so that an endless allocation fails
_OK, _FAILED, _NO_TESTS = 0, 1, 5
_BETWEEN_SECONDS = 300.0  # fixtures, and the end of processes
_PIPE_BYTES = 2**20
TOO_LONG = "took longer than it may"
BETWEEN = "(between tests)"  # in place of a test's name: the run ended while no test was running


@dataclass(frozen=True)
class Ending:
    """The end of a run of tests: the failed tests with a line of their reasons, and the passed tests."""

    failed: dict[str, str]
    passed: tuple[str, ...]
    seconds: float


class _Pipe:
    """Reads a forked process's output without waiting."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._reader, False)
        self._found = b""

    def close_writer(self) -> None:
        os.close(self.writer)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while found := os.read(self._reader, _PIPE_BYTES):
                self._found += found

    def so_far(self) -> bytes:
        return self._found

    def read_to_end(self) -> str:
        self.read()
        os.close(self._reader)
        return self._found.decode(errors="replace")


class Trial:
    """One run of pytest, under way.

    Args:
        limit: The time limit of the run, in seconds.
        patience: The time limit of each test, in seconds, if they run one after another.
    """

    def __init__(
        self,
        package: Path,
        words: Sequence[str],
        *,
        root: Path,
        folder: Path,
        limit: float,
        patience: Callable[[str], float] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trial-", dir=folder))
        self._began = time.monotonic()
        self._deadline = self._end = self._began + limit
        self._patience = patience
        self._seen = 0  # bytes
        self._words = [word.removeprefix("tests/") for word in words]
        self._options = list(options)
        # Pipes instead of files, because a test may limit the size of files.
        self._rows, self._output = _Pipe(), _Pipe()
        self._pid = os.fork()
        if not self._pid:
            self._run(package, root)
        self._rows.close_writer()
        self._output.close_writer()

    def ending(self) -> Ending | None:
        """The end of the run, or None while it runs."""
        self._rows.read()
        self._output.read()
        self._look_at_the_test()
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        late = time.monotonic() > self._deadline
        if not pid and not late:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)  # also ends ranks that are left
        if not pid:
            os.waitpid(self._pid, 0)
        rows, output = self._rows.read_to_end(), self._output.read_to_end()
        code = os.waitstatus_to_exitcode(status)
        found = self._read(rows, output, TOO_LONG if late and not pid else None, code)
        shutil.rmtree(self._folder, ignore_errors=True)
        return found

    def _look_at_the_test(self) -> None:
        """Ends the run if its present test hangs, before the limit of the whole run."""
        rows = self._rows.so_far()
        if self._patience is not None and len(rows) > self._seen and rows.endswith(b"\n"):
            self._seen = len(rows)
            row = json.loads(rows.splitlines()[-1])
            left = _BETWEEN_SECONDS if row["outcome"] == "ended" else self._patience(row["test"])
            self._deadline = min(self._end, time.monotonic() + left)

    def _read(self, text: str, output: str, why: str | None, code: int) -> Ending:
        rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        failed = {row["test"]: row["why"] for row in reversed(rows) if row["outcome"] == "failed"}
        seen = dict.fromkeys(row["test"] for row in rows if row["outcome"] == "passed")
        if why is not None or (code not in (_OK, _FAILED, _NO_TESTS) and not failed):
            ended = {row["test"] for row in rows if row["outcome"] == "ended"}
            running = [row["test"] for row in rows if row["outcome"] == "began" and row["test"] not in ended]
            if not running and why is None and code >= 0:
                tail = "\n".join(output.splitlines()[-20:])
                raise RuntimeError(f"pytest ended with code {code} and ran nothing: {self._words[:3]}\n{tail}")
            for test in running or [BETWEEN]:
                failed.setdefault(test, why or f"ended with code {code}")
        passed = tuple(test for test in seen if test not in failed)
        return Ending(failed, passed, time.monotonic() - self._began)

    def _run(self, package: Path, root: Path) -> NoReturn:
        """Runs pytest in the forked process."""
        code = 3
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
            output = self._output.writer
            for number, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
                os.dup2(target, number)
            (self._folder / "tmp").mkdir()
            tools = Path(__file__).resolve().parents[1]
            os.environ |= {
                outcomes.FILE: f"/dev/fd/{self._rows.writer}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.pathsep.join(map(str, (package, tools, tools / "mutants" / "site"))),
                "TMPDIR": str(self._folder / "tmp"),
            }
            tempfile.tempdir = None
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(package))
            # An editable install would go before the copy.
            sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable_")]
            os.chdir(root / "tests")
            code = self._pytest()
        finally:
            error = sys.exc_info()[1]
            if error is not None:
                traceback.print_exception(error)
            sys.stdout.flush()
            os._exit(code)

    def _pytest(self) -> int:
        try:
            importlib.import_module("hydra_ext")
        except Exception as error:  # noqa: BLE001 - whatever a change of the package makes of its import
            row = {"test": "import hydra_ext", "outcome": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
            os.write(self._rows.writer, json.dumps(row).encode() + b"\n")
            return _FAILED
        import pytest

        fixed = [
            "-q",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",  # plugins' packages are among what was imported
            "-p",
            "mutants.outcomes",
            "-p",
            "no:cacheprovider",
            f"--basetemp={self._folder / 'tmp' / 'base'}",
        ]
        return int(pytest.main([*fixed, *self._options, *self._words]))


def import_once() -> None:
    """Imports the slow libraries. Called before the first trial."""
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
