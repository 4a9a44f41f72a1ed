"""Which test executes which line, and how long it takes: made once for a state of the sources, folder by folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import coverage

from mutants import outcomes
from mutants.drawing import Mutant
from mutants.packages import digest

_CASES = 3  # of each test with many cases: they execute the same lines, and tracing takes its time


@dataclass(frozen=True)
class Test:
    """A test that passes where nothing is changed."""

    name: str
    seconds: float


def trace(root: Path, package: Path, folder: Path, *, workers: int) -> None:
    """Traces what has no map yet: each folder of tests, and the files beside them."""
    tests = root / "tests"
    parts = [path.name for path in sorted(tests.iterdir()) if any(path.glob("**/test_*.py"))]
    parts = [part for part in parts if part not in ("cpp", "support")]
    for part in [*parts, *(path.name for path in sorted(tests.glob("test_*.py")))]:
        _trace_part(tests, package, folder / part, part, workers)


def _trace_part(tests: Path, package: Path, folder: Path, part: str, workers: int) -> None:
    done = folder / "done"
    state = digest([tests / part] if part.endswith(".py") else (tests / part).rglob("*.py"))
    if done.exists() and done.read_text() == state:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    tools = Path(__file__).resolve().parents[1]
    environment = os.environ | {
        outcomes.FILE: str(folder / "outcomes"),
        "MUTANTS_TRACES": str(folder),
        "MUTANTS_SOURCE": str(package / "hydra_ext"),
        "MUTANTS_CASES": str(_CASES),
        "PYTHONPATH": os.pathsep.join(map(str, (package, tools, tools / "mutants" / "site"))),
    }
    plugins = ["-p", "mutants.tracing", "-p", "mutants.outcomes", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-n", str(workers), "--dist", "worksteal", part]
    with (folder / "log").open("w") as log:
        subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, check=False)
    lines = coverage.CoverageData(str(folder / "lines"))
    for path in sorted(folder.glob("trace.*")):
        one = coverage.CoverageData(str(path))
        one.read()
        lines.update(one)
        path.unlink()
    lines.write()
    print(f"{part}: {(folder / 'log').read_text().splitlines()[-1]}", flush=True)
    done.write_text(state)


class Reach:
    """The maps of all folders that were traced."""

    def __init__(self, folder: Path) -> None:
        self._parts = [path.parent for path in sorted(folder.glob("*/done"))]
        self._by_file: dict[str, dict[int, set[str]]] = {}

    @cached_property
    def all(self) -> dict[str, Test]:
        """Every traced test that passed."""
        seconds, bad = dict[str, float](), set[str]()
        for part in self._parts:
            for line in (part / "outcomes").read_text().splitlines():
                row = json.loads(line)
                seconds[row["test"]] = seconds.get(row["test"], 0.0) + row["seconds"]
                bad |= {row["test"]} if row["outcome"] in ("failed", "skipped") else set()
        return {name: Test(name, took) for name, took in seconds.items() if name not in bad}

    def tests(self, mutant: Mutant) -> list[Test]:
        """Those that execute its lines, or else its file, or else those of the folder of its name: fastest first, and
        of tests with many cases one of each before the second of any."""
        lines = self._lines(mutant.file)
        names = {name for line in mutant.reached_by for name in lines.get(line, ())}
        names = names or {name for found in lines.values() for name in found}
        found = [self.all[name] for name in names if name in self.all]
        if not found:
            folder = f"tests/{Path(mutant.file).parts[1].removesuffix('.py')}/"
            found = [test for test in self.all.values() if test.name.startswith(folder)] or list(self.all.values())
        return _in_turn(found)

    def _lines(self, file: str) -> dict[int, set[str]]:
        if file not in self._by_file:
            found = self._by_file[file] = {}
            for part in self._parts:
                lines = coverage.CoverageData(str(part / "lines"))
                lines.read()
                for path in lines.measured_files():
                    if path.endswith("/" + file):
                        for line, names in lines.contexts_by_lineno(path).items():
                            found.setdefault(line, set()).update(filter(None, names))
        return self._by_file[file]


def _in_turn(tests: Iterable[Test]) -> list[Test]:
    turns = dict[str, int]()
    keyed = []
    for test in sorted(tests, key=lambda test: (test.seconds, test.name)):
        function = test.name.partition("[")[0]
        turns[function] = turns.get(function, -1) + 1
        keyed.append((turns[function], test.seconds, test.name, test))
    return [test for *_, test in sorted(keyed, key=lambda row: row[:3])]
