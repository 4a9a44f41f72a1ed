"""Builds the engine's mutations one after another in a copy of the tree, and tries each.

C++ tests cover the code without torch, and run first, since their build takes seconds. Only mutations that survive them
are built into an extension, for the Python tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mutants.engine_core import CORE
from mutants.engine_mutation import EngineMutation
from mutants.engine_torch import TORCH
from mutants.packages import Packages
from mutants.python_trials import Judge
from mutants.results import Outcome, Result, Results

MUTATIONS = (*CORE, *TORCH)
_CPP_SECONDS = 20.0
_CPP_SLOWER = 10  # times the duration without a mutation; a longer run counts as hanging
_FILE_SECONDS = 1800.0


class BuildFailed(RuntimeError):
    """A mutation that does not compile."""


class Engine:
    """A copy of the engine's sources with two builds: the C++ tests, and the extension.

    Attributes:
        plain_tests: The C++ tests of the unchanged engine.
    """

    def __init__(self, root: Path, folder: Path, *, jobs: int) -> None:
        self._tree = folder / "tree"
        # In the same relative place as `make` has them, so that ccache finds their compilations.
        self._tests = self._tree / "build" / "make-core"
        self._extension = self._tree / "build" / "make"
        os.environ |= {"CCACHE_BASEDIR": str(self._tree), "CCACHE_NOHASHDIR": "1"}
        self.plain_tests = folder / "plain_tests"
        self._jobs = str(jobs)
        for name in ("csrc", "tests/cpp"):
            _follow(root / name, self._tree / name)
        shutil.copy2(root / "CMakeLists.txt", self._tree)
        self._limits: dict[str, float] = {}

    @contextmanager
    def mutated(self, mutations: Sequence[EngineMutation]) -> Iterator[None]:
        """Restores the files afterwards, with times later than the build of the mutations."""
        before: dict[Path, str] = {}
        try:
            for mutation in mutations:
                path = self._tree / mutation.file
                text = path.read_text()
                before.setdefault(path, text)
                path.write_text(text.replace(mutation.before, mutation.after))
            yield
        finally:
            for path, text in before.items():
                path.write_text(text)

    def build_plain_tests(self) -> None:
        """Builds the tests of the unchanged engine. Called while no file is mutated."""
        shutil.copy2(self.build_tests(), self.plain_tests)

    def cpp_limit(self, pattern: str) -> float:
        """Returns the time limit of C++ tests of this pattern: many times their duration on the unchanged engine."""
        if pattern not in self._limits:
            begun = time.monotonic()
            words = [str(self.plain_tests), f"--gtest_filter={pattern}", "--gtest_brief=1"]
            subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
            self._limits[pattern] = _CPP_SECONDS + _CPP_SLOWER * (time.monotonic() - begun)
        return self._limits[pattern]

    def build_tests(self) -> Path:
        self._build(self._tests, "hydra_tests", "-DHYDRA_PYTHON=OFF", "-DHYDRA_TESTS=ON")
        return self._tests / "hydra_tests"

    def build_extension(self) -> Path:
        python = f"-DPython_EXECUTABLE={sys.executable}"
        self._build(self._extension, "_C", "-DHYDRA_PYTHON=ON", "-DHYDRA_TESTS=OFF", "-DHYDRA_CUDA=OFF", python)
        return next(self._extension.glob("_C*.so"))

    def _build(self, folder: Path, target: str, *options: str) -> None:
        if not (folder / "build.ninja").exists():
            werror = os.environ.get("HYDRA_WERROR", "OFF")
            _run("cmake", "-S", self._tree, "-B", folder, "-G", "Ninja", f"-DHYDRA_WERROR={werror}", *options)
        _run("cmake", "--build", folder, "--target", target, "-j", self._jobs)


def _follow(source: Path, copy: Path) -> None:
    """Makes the copy equal to the source. Writes only files that differ, since the others are already built."""
    there = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for path in [path for path in copy.rglob("*") if path.is_file() and path.relative_to(copy) not in there]:
        path.unlink()
    for name in there:
        text = (source / name).read_bytes()
        if not (copy / name).exists() or (copy / name).read_bytes() != text:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(text)


def _run(*words: str | Path) -> None:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise BuildFailed(f"{' '.join(map(str, words))} ended with code {done.returncode}\n{tail}")


def expect_places(root: Path, table: Sequence[EngineMutation]) -> None:
    """Raises if the engine has changed since the table was written."""
    faults = [fault for mutation in table if (fault := mutation.fault(root)) is not None]
    if faults:
        raise RuntimeError("change tools/mutants/engine_*.py, as the engine has changed:\n" + "\n".join(faults))


def try_engine(
    root: Path,
    table: Sequence[EngineMutation],
    results: Results,
    judge: Judge,
    packages: Packages,
    engine: Engine,
) -> None:
    """Tries each of these mutations that has no result yet. Raises at the end if some cannot be built."""
    waiting = [mutation for mutation in table if results.get(mutation.key) is None]
    not_built: list[str] = []
    if any(mutation.cpp for mutation in waiting):
        engine.build_plain_tests()
    for number, mutation in enumerate(waiting, 1):
        try:
            with engine.mutated([mutation]):
                killed, tests, seconds = _tried(mutation, judge, packages, engine)
        except BuildFailed as error:
            not_built.append(f"{mutation.place(root)} {mutation.breaks}: {error}")
            continue
        outcome = Outcome.KILLED if killed else Outcome.SURVIVED
        by, why = killed or ("", "")
        results.add(engine_result(root, mutation, outcome, by, why, tests, seconds))
        left = len(waiting) - number
        print(f"{outcome.value:9} {mutation.place(root)} {by or mutation.breaks} ({left} left)", flush=True)
    if not_built:
        raise BuildFailed("\n".join(not_built))


def engine_result(
    root: Path, mutation: EngineMutation, outcome: Outcome, by: str, why: str, tests: int, seconds: float
) -> Result:
    return Result(
        key=mutation.key,
        part="engine",
        place=mutation.place(root),
        function=mutation.breaks,
        change=mutation.change,
        outcome=outcome,
        by=by,
        why=why,
        tests=tests,
        seconds=round(seconds, 1),
    )


_Tried = tuple[tuple[str, str] | None, int, float]


def _tried(mutation: EngineMutation, judge: Judge, packages: Packages, engine: Engine) -> _Tried:
    """Returns the test that killed it, the reason, the number of test files that were run, and the seconds."""
    runs = 0
    if mutation.cpp:
        program = engine.build_tests()
        for pattern in (mutation.cpp, "*"):
            runs += 1
            limit = engine.cpp_limit(pattern)
            found = cpp_failure(program, pattern, limit)
            # Runs it again, and once on the unchanged engine, since it may have failed by chance.
            if found and cpp_failure(program, found[0], limit) and not cpp_failure(engine.plain_tests, found[0], limit):
                return found, runs, 0.0
    extension = engine.build_extension()
    package = packages.changed({f"hydra_ext/{extension.name}": extension})
    seconds = 0.0
    try:
        for file in mutation.python:
            runs += 1
            ending = judge.run(package, [file], "--maxfail=3", limit=_FILE_SECONDS)
            seconds += ending.seconds
            for test, why in ending.failed.items():
                if judge.confirmed(package, test, why, [file]):
                    return (test, why), runs, seconds
    finally:
        shutil.rmtree(package)
    return None, runs, seconds


def cpp_failure(program: Path, pattern: str, limit: float) -> tuple[str, str] | None:
    """Returns a failing GoogleTest and its reason, or None. ``limit`` is in seconds."""
    words = [str(program), f"--gtest_filter={pattern}", "--gtest_brief=1", "--gtest_fail_fast"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = running.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()
        return pattern, "took longer than it may"
    if running.returncode == 0:
        return None
    failed = [
        line.split("]", 1)[1].split("(")[0].split(",")[0].strip()
        for line in output.splitlines()
        if "[  FAILED  ]" in line
    ]
    return (failed or [pattern])[0], f"ended with code {running.returncode}"
