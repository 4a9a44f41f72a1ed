"""The map of tests to the lines that they execute and the time they take. Made once for a state of the tests.

If a source has changed since, its lines are looked up at their new places. New lines count as executed by the tests of
the lines around them. The whole suite makes up for what that misses.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
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

_CASES = 3  # cases of each test: they execute the same lines, and tracing is slow


@dataclass(frozen=True)
class Test:
    """A test that passes on the unchanged package."""

    name: str
    seconds: float


def trace(root: Path, package: Path, folder: Path, *, workers: int) -> None:
    """Traces each folder of tests that has no map yet, and the test files beside the folders."""
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
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(package / "hydra_ext", folder / "hydra_ext", ignore=_ignored)
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


def _ignored(folder: str, names: list[str]) -> list[str]:
    """Names all files but Python sources."""
    return [name for name in names if not (name.endswith(".py") or (Path(folder) / name).is_dir())]


def moved(before: str, now: str) -> dict[int, range]:
    """Maps each old line to its present place; a replaced line maps to all lines that replaced it."""
    found: dict[int, range] = {}
    matcher = difflib.SequenceMatcher(None, before.splitlines(), now.splitlines(), autojunk=False)
    for kind, first, last, first_now, last_now in matcher.get_opcodes():
        for line in range(first, last):
            if kind == "equal":
                place = first_now + line - first
                found[line + 1] = range(place + 1, place + 2)
            else:
                found[line + 1] = range(first_now + 1, last_now + 1)
        if kind == "insert" and first > 0:
            found[first] = range(found[first].start, last_now + 1)
    return found


class Reach:
    """The maps of all folders that were traced.

    Args:
        root: The root of the present sources.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._root = root
        parts = [path.parent for path in sorted(folder.glob("*/done"))]
        self._parts = [part for part in parts if (root / "tests" / part.name).exists()]
        self._by_file: dict[str, dict[int, set[str]]] = {}

    @cached_property
    def all(self) -> dict[str, Test]:
        """Returns every traced test that passed."""
        seconds, bad = dict[str, float](), set[str]()
        for part in self._parts:
            for line in (part / "outcomes").read_text().splitlines():
                row = json.loads(line)
                seconds[row["test"]] = seconds.get(row["test"], 0.0) + row["seconds"]
                bad |= {row["test"]} if row["outcome"] in ("failed", "skipped") else set()
        return {name: Test(name, took) for name, took in seconds.items() if name not in bad}

    def tests(self, mutant: Mutant) -> list[Test]:
        """Returns the tests that execute the mutant's lines, else those of its file, else those in the folder of its
        name. Fastest first; of tests with many cases, the first case of each goes before the second of any."""
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
                        places = moved((part / file).read_text(), (self._root / file).read_text())
                        for line, names in lines.contexts_by_lineno(path).items():
                            for place in places.get(line, ()):
                                found.setdefault(place, set()).update(filter(None, names))
        return self._by_file[file]


def _in_turn(tests: Iterable[Test]) -> list[Test]:
    turns = dict[str, int]()
    keyed = []
    for test in sorted(tests, key=lambda test: (test.seconds, test.name)):
        function = test.name.partition("[")[0]
        turns[function] = turns.get(function, -1) + 1
        keyed.append((turns[function], test.seconds, test.name, test))
    return [test for *_, test in sorted(keyed, key=lambda row: row[:3])]
