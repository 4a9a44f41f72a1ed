"""The results of all mutants, in a file that a later run continues."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from mutants.packages import digest

_SOURCES = (".py", ".cpp", ".h", ".cu")
_GOOGLETEST = re.compile(r"(?:\w+/)?(\w+)\.(\w+)")


class Outcome(enum.Enum):
    KILLED = "killed"
    SURVIVED = "survived"  # survived the tests chosen for it
    SURVIVED_ALL = "survived all"  # survived the whole suite


@dataclass(frozen=True)
class Result:
    """The result of one mutant, for one state of the files that it depends on."""

    key: str
    part: str  # "python" or "engine"
    place: str
    function: str
    change: tuple[str, ...]
    outcome: Outcome
    by: str  # the test that killed it
    why: str
    tests: int  # number of tests tried
    seconds: float
    source: str = ""  # the digest of the mutated file
    against: str = ""  # the digest of the file of the test that killed it, or of the whole suite


class Results:
    """A file of results. New ones are appended; the last one of a mutant counts.

    A killed mutant's result is valid while the mutated file and the killing test's file do not change. A survivor's
    result depends on the files of all tests. Changes of other files can affect a test too, but too rarely to try all
    mutants again.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root
        self._found: dict[str, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            if "against" in row:
                self._take(Result(**{**row, "change": tuple(row["change"]), "outcome": Outcome(row["outcome"])}))

    def _take(self, result: Result) -> None:
        if result == self._stamped(result):
            self._found[result.key] = result

    def get(self, key: str) -> Result | None:
        return self._found.get(key)

    def add(self, result: Result) -> None:
        stamped = self._stamped(result)
        self._found[stamped.key] = stamped
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({**asdict(stamped), "outcome": stamped.outcome.value}) + "\n")

    def _stamped(self, result: Result) -> Result:
        killed = result.outcome is Outcome.KILLED
        against = self._digest_of_test(result.by) if killed else self._suite
        return replace(result, source=self._digest(result.place.rpartition(":")[0]), against=against)

    @cached_property
    def _suite(self) -> str:
        return digest(path for path in (self._root / "tests").rglob("*") if path.suffix in _SOURCES)

    def _digest_of_test(self, test: str) -> str:
        """Returns the digest of the test's file, or of all tests' files if it is unknown."""
        name = test.partition("::")[0]
        if name.startswith("import "):
            return ""  # no test killed it: the package cannot be imported
        if name.endswith(".py"):
            return self._digest(name if name.startswith("tests/") else f"tests/{name}")
        googletest = _GOOGLETEST.match(name)
        if googletest:
            definition = re.compile(rf"\bTEST(_F|_P)?\(\s*{googletest[1]}\s*,\s*{googletest[2]}\s*\)")
            for path in sorted((self._root / "tests" / "cpp").rglob("*.cpp")):
                if definition.search(path.read_text()):
                    return digest([path])
        return self._suite

    def _digest(self, name: str) -> str:
        path = self._root / name
        return digest([path]) if path.is_file() else "gone"
