"""What became of each mutant, kept in a file that a later run goes on with."""

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
    SURVIVED = "survived"  # the tests that were to find it
    SURVIVED_ALL = "survived all"  # the whole suite


@dataclass(frozen=True)
class Result:
    """Of one mutant, for one state of what it depends on."""

    key: str
    part: str  # "python" or "engine"
    place: str
    function: str
    change: tuple[str, ...]
    outcome: Outcome
    by: str  # the test that killed it
    why: str
    tests: int  # that were tried
    seconds: float
    source: str = ""  # the digest of the mutated file
    against: str = ""  # the digest of the file of the test that killed it, or of the whole suite


class Results:
    """Appended to as they come; the last of a mutant counts.

    A result stands while the mutated file does, and the file of the test that killed it, or all files of tests where it
    survived: other files may have changed what a test sees, but not so often that all has to be tried again.
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
        """Of its file; of all tests' where it cannot be told."""
        name = test.partition("::")[0]
        if name.startswith("import "):
            return ""  # no test's: the package cannot be imported
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
