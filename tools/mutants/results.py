"""What became of each mutant, kept in a file that a later run goes on with."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path


class Outcome(enum.Enum):
    KILLED = "killed"
    SURVIVED = "survived"  # the tests that were to find it
    SURVIVED_ALL = "survived all"  # the whole suite


@dataclass(frozen=True)
class Result:
    """Of one mutant, for one state of the sources and of the tests."""

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
    sources: str  # the digest of what was mutated
    suite: str  # the digest of the tests


class Results:
    """Appended to as they come; the last of a mutant counts."""

    def __init__(self, path: Path, *, sources: str, suite: str) -> None:
        self._path = path
        self._sources = sources
        self._suite = suite
        self._found: dict[str, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            self._take(Result(**{**row, "change": tuple(row["change"]), "outcome": Outcome(row["outcome"])}))

    def _take(self, result: Result) -> None:
        """What survived other tests is tried again; what was killed stays so while its sources stand."""
        if result.sources != self._sources:
            return
        if result.outcome is Outcome.KILLED or result.suite == self._suite:
            self._found[result.key] = result

    def get(self, key: str) -> Result | None:
        return self._found.get(key)

    def add(self, result: Result) -> None:
        stamped = replace(result, sources=self._sources, suite=self._suite)
        self._take(stamped)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({**asdict(stamped), "outcome": stamped.outcome.value}) + "\n")
