"""Writes the outcomes of all mutants, as a table in Markdown."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mutants.equivalents import proof_of
from mutants.results import Outcome, Result

_MOST_EQUIVALENT = 0.10
_LEAST_KILLED = 0.90


def write(path: Path, root: Path, *, seed: int, drawn: int, python: list[Result], engine: list[Result]) -> str:
    """Writes the report and returns its first lines."""
    summary = [*_counts("Python package", python), *_counts("Engine", engine)]
    lines = [
        "# Mutations",
        "",
        f"`make mutants COUNT={drawn} SEED={seed}` at {_commit(root)}, on {platform.machine()}, "
        f"Python {platform.python_version()}. Python mutants are drawn by the seed in proportion to the lines of the "
        f"files, none taken out by hand; {len(python)} of {drawn} were tried. The engine's are a table "
        "(`tools/mutants/engine_core.py`, `engine_torch.py`). "
        "Each meets the tests that coverage names, or the table; what survives meets the whole suite.",
        "",
        "| | mutants | killed | survived | equivalent | killed of the rest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *summary,
        "",
        *_section("Survived", [result for result in [*python, *engine] if _is_survivor(result)]),
        *_section("Equivalent", [result for result in [*python, *engine] if _proof(result)]),
        "## Killed",
        "",
        "| mutant | by |",
        "| --- | --- |",
        *(f"| {result.place} | {result.by} |" for result in [*python, *engine] if result.outcome is Outcome.KILLED),
        "",
        "## By folder",
        "",
        "| folder | killed | survived | equivalent |",
        "| --- | ---: | ---: | ---: |",
        *_folders([*python, *engine]),
        "",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return "\n".join(summary)


def _proof(result: Result) -> str | None:
    """Returns the proof of equivalence, except for a killed mutant, which cannot be equivalent."""
    return (
        None
        if result.outcome is Outcome.KILLED
        else proof_of(result.place.rpartition(":")[0], result.function, result.change)
    )


def _is_survivor(result: Result) -> bool:
    return result.outcome is not Outcome.KILLED and _proof(result) is None


def _counts(name: str, results: list[Result]) -> list[str]:
    if not results:
        return []
    killed = sum(result.outcome is Outcome.KILLED for result in results)
    equivalent = sum(_proof(result) is not None for result in results)
    rest = len(results) - equivalent
    share = killed / rest if rest else 1.0
    goals = [
        f"goal {_LEAST_KILLED:.0%}: {'holds' if share >= _LEAST_KILLED else 'missed'}",
        f"at most {_MOST_EQUIVALENT:.0%} equivalent: "
        f"{'holds' if equivalent <= _MOST_EQUIVALENT * len(results) else 'missed'}",
    ]
    return [
        f"| {name} | {len(results)} | {killed} | {rest - killed} | {equivalent} | {share:.1%} ({'; '.join(goals)}) |",
    ]


def _section(title: str, results: Iterable[Result]) -> list[str]:
    lines = [f"## {title}", ""]
    for result in results:
        met = "the whole suite" if result.outcome is Outcome.SURVIVED_ALL else f"{result.tests} tests"
        lines += [
            f"{result.place} `{result.function or 'the module'}` ({result.key}; {met})",
            "",
            "```diff",
            *result.change,
            "```",
            "",
        ]
        if proof := _proof(result):
            lines += [proof, ""]
    return lines if len(lines) > 2 else [*lines, "None.", ""]


def _folders(results: list[Result]) -> list[str]:
    counts = Counter[tuple[str, str]]()
    for result in results:
        kind = "killed" if result.outcome is Outcome.KILLED else "equivalent" if _proof(result) else "survived"
        counts["/".join(result.place.split(":")[0].split("/")[:2]), kind] += 1
    return [
        f"| {folder} | " + " | ".join(str(counts[folder, kind]) for kind in ("killed", "survived", "equivalent")) + " |"
        for folder in sorted({folder for folder, _ in counts})
    ]


def _commit(root: Path) -> str:
    words = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "an unknown commit"
