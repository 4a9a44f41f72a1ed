"""Runs the whole suite against the mutants that survived their own tests, in one package unless they overlap.

A test that fails there is run against each survivor alone, so a result is always that of a single mutant. The rest meet
the suite again, without the killed ones that may have hidden them, until no more are killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mutants.drawing import Mutant
from mutants.engine_mutation import EngineMutation
from mutants.engine_trials import Engine
from mutants.packages import Packages
from mutants.python_trials import Judge
from mutants.results import Outcome, Result, Results

_One = Mutant | EngineMutation


def meet_all(
    root: Path,
    mutants: Sequence[Mutant],
    table: Sequence[EngineMutation],
    results: Results,
    judge: Judge,
    packages: Packages,
    engine: Engine,
    workers: int,
) -> None:
    """Runs the whole suite, once or as often as changes overlap."""
    packed = _Packed(root, packages, engine)
    all_of_them: list[_One] = [*mutants, *table]
    left = [one for one in all_of_them if _has_survived(results.get(one.key))]
    while left:
        together, left = _apart(left)
        package = packed.package(together)
        print(f"{len(together)} survivors meet the whole suite", flush=True)
        failed = list(judge.run_suite(package, workers))
        shutil.rmtree(package)
        killed = [result for one in together if (result := _killed(packed, one, results, failed, judge))]
        print(f"{len(failed)} tests failed, {len(killed)} of the survivors by themselves", flush=True)
        for result in killed:
            results.add(result)
        rest = [one for one in together if _has_survived(results.get(one.key))]
        if killed:
            left = [*rest, *left]  # again, without the killed ones that may have hidden them
            continue
        for one in rest:
            result = results.get(one.key)
            if result is not None:
                results.add(replace(result, outcome=Outcome.SURVIVED_ALL))


def _has_survived(result: Result | None) -> bool:
    return result is not None and result.outcome is Outcome.SURVIVED


class _Packed:
    """Makes packages with several changes in them."""

    def __init__(self, root: Path, packages: Packages, engine: Engine) -> None:
        self._root = root
        self._packages = packages
        self._engine = engine

    def package(self, together: Sequence[_One]) -> Path:
        python = [one for one in together if isinstance(one, Mutant)]
        engine = [one for one in together if isinstance(one, EngineMutation)]
        files: dict[str, str | Path] = {}
        for name in {mutant.file for mutant in python}:
            text = (self._root / name).read_bytes()
            edits = [mutant.edit for mutant in python if mutant.file == name]
            for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
                text = edit.applied(text)
            files[name] = text.decode()
        with ExitStack() as stack:
            if engine:
                stack.enter_context(self._engine.mutated(engine))
                extension = self._engine.build_extension()
                files[f"hydra_ext/{extension.name}"] = extension
            return self._packages.changed(files)


def _apart(ones: Sequence[_One]) -> tuple[list[_One], list[_One]]:
    """Returns mutants whose changes do not overlap, and the rest."""
    chosen: list[_One] = []
    rest: list[_One] = []
    for one in ones:
        (rest if any(_overlap(one, other) for other in chosen) else chosen).append(one)
    return chosen, rest


def _overlap(one: _One, other: _One) -> bool:
    if one.file != other.file:
        return False
    if isinstance(one, Mutant) and isinstance(other, Mutant):
        return one.edit.start < other.edit.end and other.edit.start < one.edit.end
    return True  # one of the engine's texts may contain the other


def _killed(packed: _Packed, one: _One, results: Results, failed: Sequence[str], judge: Judge) -> Result | None:
    """Returns the mutant's new result if one of the tests fails with it alone."""
    before = results.get(one.key)
    if before is None or not failed:
        return None
    package = packed.package([one])
    try:
        for test in failed:
            for name, why in judge.run(package, [test]).failed.items():
                if judge.confirmed(package, name, why, [test]):
                    return replace(before, outcome=Outcome.KILLED, by=name, why=why)
    finally:
        shutil.rmtree(package)
    return None
