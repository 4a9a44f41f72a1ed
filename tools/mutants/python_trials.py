"""Tries mutants of the Python package against the tests that execute their lines."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants.drawing import Mutant
from mutants.packages import Packages
from mutants.reach import Reach
from mutants.results import Outcome, Result, Results
from mutants.trials import BETWEEN, TOO_LONG, Ending, Trial

_FIRST_TESTS = 12  # the first few kill most mutants
_FIRST_SECONDS = 20.0
_MOST_SECONDS = 60.0  # for all tests that execute the line; survivors meet the whole suite
_SLOWER = 8.0  # a limit is this many times the duration on the unchanged package, since other work runs beside,
_START_SECONDS = 120.0  # plus this: for a run,
_TEST_SECONDS = 45.0  # or for one test
_PART_SECONDS = 3600.0  # for a folder of tests
_NOT_OF_THE_PACKAGE = ("--deselect=test_architecture.py",)  # it reads the tree, which has no mutants
_PERHAPS_BY_CHANCE = re.compile(r"time|second|deadline|hang|alive|took longer|ended with", re.IGNORECASE)


class Judge:
    """Runs tests against packages. Only tests that pass on the unchanged package count."""

    def __init__(self, root: Path, packages: Packages, folder: Path, suite: Reach) -> None:
        self._root = root
        self._packages = packages
        self._folder = folder
        self._suite = suite
        self._sound: dict[str, bool] = {}

    def start(self, package: Path, tests: list[str], *options: str, limit: float | None = None) -> Trial:
        if limit is None:
            known = self._suite.all
            seconds = sum(known[name].seconds if name in known else 30.0 for name in tests)
            limit = _START_SECONDS + _SLOWER * seconds
        patience = None if "-n" in options else self._patience
        return Trial(
            package, tests, root=self._root, folder=self._folder, limit=limit, patience=patience, options=options
        )

    def _patience(self, test: str) -> float:
        """The time limit of one test, in seconds."""
        known = self._suite.all.get(test)
        return _TEST_SECONDS + _SLOWER * (known.seconds if known is not None else _MOST_SECONDS / _SLOWER)

    def run(self, package: Path, tests: list[str], *options: str, limit: float | None = None) -> Ending:
        return wait(self.start(package, tests, *options, limit=limit))

    def run_suite(self, package: Path, workers: int) -> dict[str, str]:
        """Returns the failures of the whole suite, with reasons. Runs it folder by folder, each with its own limit."""
        failed = dict[str, str]()
        tests = self._root / "tests"
        for part in sorted({path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}):
            options = ["-n", str(workers), "--dist", "worksteal", *_NOT_OF_THE_PACKAGE]
            hanging = [part]
            while hanging:  # the other tests of the folder are still to run
                ending = self.run(package, [part], *options, limit=_PART_SECONDS)
                failed |= ending.failed
                hanging = [test for test, why in ending.failed.items() if why == TOO_LONG]
                if BETWEEN in ending.failed:
                    raise RuntimeError(f"of the tests of {part} none was running: {ending.failed[BETWEEN]}")
                options += [f"--deselect={test.removeprefix('tests/')}" for test in hanging]
        return failed

    def confirmed(self, package: Path, test: str, why: str, batch: list[str]) -> bool:
        """Whether the change causes a failure: the test passes without the change. If the failure may be by chance, the
        test also has to fail again with it.

        Args:
            batch: The tests that were run; all run again if the failure was between tests.
        """
        if test == BETWEEN:
            again = self.run(package, batch).failed
            if BETWEEN in again:
                return not self.run(self._packages.plain, batch).failed
            return any(self.confirmed(package, other, reason, batch) for other, reason in again.items())
        if "::" not in test:
            return True  # the package or a test file cannot be imported
        if test not in self._sound:
            self._sound[test] = not self.run(self._packages.plain, [test]).failed
        if not self._sound[test]:
            return False
        return not _PERHAPS_BY_CHANCE.search(why) or bool(self.run(package, [test]).failed)


def wait(trial: Trial) -> Ending:
    while (found := trial.ending()) is None:
        time.sleep(0.05)
    return found


@dataclass
class _Case:
    """A mutant on trial."""

    mutant: Mutant
    package: Path
    batch: list[str]
    left: list[list[str]]
    trial: Trial
    tried: int
    seconds: float = 0.0


def try_all(mutants: list[Mutant], results: Results, judge: Judge, packages: Packages, reach: Reach, jobs: int) -> None:
    """Tries each mutant that has no result yet, ``jobs`` at a time."""
    waiting = [mutant for mutant in mutants if results.get(mutant.key) is None]
    under_way: list[_Case] = []
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            under_way.append(_begun(waiting.pop(0), judge, packages, reach))
        time.sleep(0.05)
        for case in list(under_way):
            result = _advanced(case, judge)
            if result is not None:
                under_way.remove(case)
                shutil.rmtree(case.package)
                results.add(result)
                left = len(waiting) + len(under_way)
                print(f"{result.outcome.value:9} {result.place} {result.by or result.key} ({left} left)", flush=True)


def _begun(mutant: Mutant, judge: Judge, packages: Packages, reach: Reach) -> _Case:
    first, *left = list(_batches(mutant, reach))
    package = packages.changed({mutant.file: mutant.text})
    return _Case(mutant, package, first, left, judge.start(package, first, "-x"), tried=len(first))


def _batches(mutant: Mutant, reach: Reach) -> Iterator[list[str]]:
    """Returns the fastest few tests, then the others. Leaves tests with many cases, of which only some were traced, to
    the whole suite.
    """
    left = list(reach.tests(mutant))
    first, seconds = list[str](), 0.0
    while left and len(first) < _FIRST_TESTS and (not first or seconds + left[0].seconds <= _FIRST_SECONDS):
        seconds += left[0].seconds
        first.append(left.pop(0).name)
    if first:
        yield first
    others = list[str]()
    for test in reach.tests(mutant):
        seconds += test.seconds
        if seconds > _MOST_SECONDS:
            break
        if test.name not in first:
            others.append(test.name)
    if others:
        yield others


def _advanced(case: _Case, judge: Judge) -> Result | None:
    ending = case.trial.ending()
    if ending is None:
        return None
    case.seconds += ending.seconds
    for test, why in ending.failed.items():
        if judge.confirmed(case.package, test, why, case.batch):
            return _result(case, Outcome.KILLED, test, why)
        if test == BETWEEN:
            continue  # the batch has been run again
        # -x stopped there: the rest of the batch is still to run.
        case.left.insert(0, [name for name in case.batch if name not in (test, test.partition("[")[0], *ending.passed)])
    case.left = [batch for batch in case.left if batch]
    if not case.left:
        return _result(case, Outcome.SURVIVED, "", "")
    case.batch = case.left.pop(0)
    case.tried += len(case.batch)
    case.trial = judge.start(case.package, case.batch, "-x")
    return None


def _result(case: _Case, outcome: Outcome, by: str, why: str) -> Result:
    mutant = case.mutant
    return Result(
        key=mutant.key,
        part="python",
        place=mutant.place,
        function=mutant.function,
        change=mutant.change,
        outcome=outcome,
        by=by,
        why=why,
        tests=case.tried,
        seconds=round(case.seconds, 1),
    )
