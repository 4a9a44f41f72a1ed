"""The runner of mutations: what it changes, what it draws, and what it remembers."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mutants import drawing, engine_trials, operators
from mutants.edits import difference
from mutants.engine_mutation import EngineMutation
from mutants.python_trials import Judge
from mutants.reach import moved
from mutants.results import Outcome, Result, Results
from mutants.trials import Ending

TESTS = Path(__file__).parent
PATHS = (str(TESTS), str(TESTS.parent / "tools"))

SOURCE = '''
"""A module."""
import torch

def share(total: int, *, parts: int = 4) -> int:
    """Of each."""
    if total < 0:
        raise ValueError("negative")
    return total // parts
'''


def changed(source: str) -> set[str]:
    """Every source that the operators make of this one and that compiles."""
    text = source.encode()
    made = {edit.applied(text).decode() for edit in operators.edits(text)}
    return {ast.unparse(ast.parse(one)) for one in made if compiles(one)}


def compiles(source: str) -> bool:
    try:
        compile(source, "made", "exec")
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b", "a >= b", "pass"}),
        ("(a) is not (b)", {"a is b", "pass"}),
        ("a + (b)", {"a - b", "pass"}),
        ("x = not a", {"x = a"}),
        ("x = a and b(c)", {"x = a or b(c)", "x = a", "x = b(c)", "x = a and (not b(c))"}),
        ("x = 3", {"x = 2", "x = 4"}),
        ("x = True", {"x = False"}),
        ("x.y = z", {"pass"}),
        ("x += y", {"x -= y", "pass"}),
        ("f(a, b=c)", {"f(a)", "pass"}),
        ("f(a, b)", {"f(b, a)", "f(a)", "pass"}),
        ("x = a.b()", {"x = a"}),
        ("x = a[b:c]", {"x = a[:c]", "x = a[b:]"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if True]", "x = [a for a in b if not c]"}),
        ("x = min(a, b)", {"x = max(a, b)", "x = min(b, a)", "x = min(a)"}),
        ("if a:\n    b = c", {"if not a:\n    b = c"}),
        ("with a:\n    b = c", {"if True:\n    b = c"}),
        ("with a, b:\n    c = d", {"with a:\n    c = d"}),
        ("try:\n    a = b\nexcept (c, d):\n    e = f", {f"try:\n    a = b\nexcept {x}:\n    e = f" for x in "cd"}),
        ("try:\n    a = b\nfinally:\n    c.d = e", {"try:\n    a = b\nfinally:\n    pass"}),
        ("for a in b:\n    continue", {"for a in b:\n    break", "for a in b:\n    pass"}),
        ("raise A(b)", {"raise Exception(b)", "pass"}),
    ],
)
def test_what_is_changed(source: str, expected: set[str]) -> None:
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source", ["x: int | None", "def f(a: int) -> 'b': ...", "'text'", 'x = f"{a + b}"', "f'{a < b}'"]
)
def test_what_is_left_alone(source: str) -> None:
    assert changed(source) <= {"pass"}


def test_draws_repeat_and_more_of_them_begin_with_the_same(tmp_path: Path) -> None:
    package = tmp_path / "hydra_ext"
    package.mkdir()
    (package / "one.py").write_text(SOURCE)
    few = drawing.draw(tmp_path, 7, 3)
    more = drawing.draw(tmp_path, 7, 5)
    assert [mutant.key for mutant in more[:3]] == [mutant.key for mutant in few]
    assert len({mutant.key for mutant in more}) == 5
    (package / "one.py").write_text("\n\n" + SOURCE)
    moved = drawing.draw(tmp_path, 7, 5)
    assert {mutant.key for mutant in moved} == {mutant.key for mutant in more}
    assert {mutant.line for mutant in moved} == {mutant.line + 2 for mutant in more}


def test_a_mutant_is_found_by_what_runs_its_statement(tmp_path: Path) -> None:
    package = tmp_path / "hydra_ext"
    package.mkdir()
    (package / "one.py").write_text(SOURCE)
    (source,) = drawing.sources(tmp_path)
    places = {(mutant.function, mutant.line): mutant.reached_by for mutant in source.all_mutants()}
    assert places == {
        ("share", 5): range(5, 10),  # a default: whatever runs the function
        ("share", 7): range(7, 8),
        ("share", 8): range(8, 9),
        ("share", 9): range(9, 10),
    }


def test_equal_lines_of_a_function_are_told_apart(tmp_path: Path) -> None:
    package = tmp_path / "hydra_ext"
    package.mkdir()
    twice = "def f(a):\n    if a:\n        a = g(1)\n    else:\n        a = g(1)\n    return a\n"
    (package / "one.py").write_text(f"def g(a):\n    a = g(1)\n\n\n{twice}")
    (source,) = drawing.sources(tmp_path)
    mutants = [mutant for mutant in source.all_mutants() if mutant.change == ("- a = g(1)", "+ a = g(2)")]
    assert {(m.function, m.line, m.occurrence) for m in mutants} == {("g", 2, 0), ("f", 7, 0), ("f", 9, 1)}
    assert len({mutant.key for mutant in mutants}) == 3


RESULT = Result("", "", "", "", ("- a", "+ b"), Outcome.SURVIVED, "", "", 3, 1.0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("hydra_ext/f.py", "hydra_ext/g.py", "csrc/e.cpp", "tests/a/test_a.py", "tests/b/test_b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "tests/cpp").mkdir()
    (tmp_path / "tests/cpp/one.cpp").write_text("TEST_P(Paging, Evicts) {}")
    (tmp_path / "tests/cpp/two.cpp").write_text("TEST(Other, Thing) {}")
    by = {"k": "tests/a/test_a.py::test_it[1]", "i": "import hydra_ext", "c": "a/test_a.py"}
    results = Results(tmp_path / "results", tmp_path)
    for key, test in by.items():
        results.add(replace(RESULT, key=key, place="hydra_ext/f.py:1", outcome=Outcome.KILLED, by=test))
    results.add(replace(RESULT, key="s", place="hydra_ext/f.py:3"))
    results.add(replace(RESULT, key="a", place="hydra_ext/g.py:3", outcome=Outcome.SURVIVED_ALL))
    for key, test in {"p": "Sizes/Paging.Evicts/0", "q": "Paging.*:Other.*"}.items():
        results.add(replace(RESULT, key=key, place="csrc/e.cpp:1", outcome=Outcome.KILLED, by=test))
    return tmp_path


@pytest.mark.parametrize(
    ("changed_file", "stand"),
    [
        ("hydra_ext/h.py", "kicsapq"),
        ("hydra_ext/g.py", "kicspq"),
        ("hydra_ext/f.py", "apq"),
        ("csrc/e.cpp", "kicsa"),
        ("tests/a/test_a.py", "ip"),
        ("tests/b/test_b.py", "kicp"),
        ("tests/cpp/one.cpp", "kic"),
        ("tests/cpp/two.cpp", "kicp"),
    ],
)
def test_a_result_stands_while_its_file_and_its_test_do(tree: Path, changed_file: str, stand: str) -> None:
    assert set(standing(tree)) == set("kicsapq")
    (tree / changed_file).write_text("TEST(Other, Thing) { now(); }")
    assert set(standing(tree)) == set(stand)


def test_a_killed_mutant_does_not_outlast_its_test(tree: Path) -> None:
    (tree / "tests/a/test_a.py").unlink()
    assert set(standing(tree)) == set("ip")


def standing(tree: Path) -> list[str]:
    results = Results(tree / "results", tree)
    return [key for key in "kicsapq" if results.get(key) is not None]


def test_lines_are_found_again_where_they_stand_now() -> None:
    before = "a\nb\nc\nd\n"
    assert moved(before, before) == {line: range(line, line + 1) for line in range(1, 5)}
    assert moved(before, "x\na\nc\nC\nd\ne\n") == {
        1: range(2, 3),
        2: range(3, 3),
        3: range(3, 5),
        4: range(5, 7),
    }
    assert moved(before, "a\nB\nB\nc\nd\n")[2] == range(2, 4)


# ---- what counts as killed ------------------------------------------------------------------------------------------
PASSES = Ending({}, ("a/test_a.py::t",), 1.0)


def ending(*tests: str, why: str = "AssertionError") -> Ending:
    return Ending(dict.fromkeys(tests, why), (), 1.0)


class Scripted(Judge):
    """Whose runs end as they are told to, in turn: of the mutant, and of the package as it is."""

    def __init__(self, mutant: list[Ending], plain: list[Ending]) -> None:
        super().__init__(Path(), SimpleNamespace(plain=Path("plain")), Path(), SimpleNamespace(all={}))  # type: ignore[arg-type]
        self.endings = {Path("mutant"): mutant, Path("plain"): plain}

    def run(self, package: Path, tests: list[str], *options: str, limit: float | None = None) -> Ending:
        return self.endings[package].pop(0)

    def says(self, test: str, why: str) -> bool:
        found = self.confirmed(Path("mutant"), test, why, ["a/test_a.py::t"])
        assert not any(self.endings.values())
        return found


@pytest.mark.parametrize("why", ["took longer than it may", "ended with code -9"])
def test_a_run_that_ends_between_tests_is_run_again(why: str) -> None:
    between = "(between tests)"
    assert not Scripted([PASSES], []).says(between, why)
    assert Scripted([ending(between, why=why)], [PASSES]).says(between, why)
    assert not Scripted([ending(between, why=why)], [ending(between, why=why)]).says(between, why)
    assert Scripted([ending("a/test_a.py::t")], [PASSES]).says(between, why)
    assert not Scripted([ending("a/test_a.py::t")], [ending("a/test_a.py::t")]).says(between, why)


def test_a_failure_is_the_mutants_if_the_test_passes_without_it() -> None:
    assert Scripted([], [PASSES]).says("a/test_a.py::t", "AssertionError")
    assert not Scripted([], [ending("a/test_a.py::t")]).says("a/test_a.py::t", "AssertionError")
    assert Scripted([ending("a/test_a.py::t")], [PASSES]).says("a/test_a.py::t", "took longer than it may")
    assert not Scripted([PASSES], [PASSES]).says("a/test_a.py::t", "took longer than it may")
    for test in ("import hydra_ext", "a/test_a.py"):
        assert Scripted([], []).says(test, "ImportError")


@pytest.mark.parametrize(
    ("mutant", "plain", "killed"),
    [("exit 1", "exit 0", True), ("exit 1", "exit 1", False), ("[ -e $0.x ] || { touch $0.x; exit 1; }", "", False)],
)
def test_a_cpp_test_that_fails_is_run_again_and_without_the_mutation(
    mutant: str, plain: str, killed: bool, tmp_path: Path
) -> None:
    for name, text in (("mutant", mutant), ("plain", plain)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '[  FAILED  ] Paging.Evicts (3 ms)'\n{text}\n")
        (tmp_path / name).chmod(0o700)
    made = tmp_path / "package"
    made.mkdir()
    engine: Any = SimpleNamespace(
        build_tests=lambda: tmp_path / "mutant",
        plain_tests=tmp_path / "plain",
        cpp_limit=lambda pattern: 60.0,
        build_extension=lambda: made / "_C.so",
    )
    packages: Any = SimpleNamespace(changed=lambda files: made)
    mutation = EngineMutation("csrc/e.cpp", "a", "b", "nothing", cpp="Paging.*")
    found, *_ = engine_trials._tried(mutation, Scripted([], []), packages, engine)
    assert found == (("Paging.Evicts", "ended with code 1") if killed else None)


def test_a_cpp_test_that_hangs_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    assert engine_trials.cpp_failure(program, "Paging.*", 0.5) == ("Paging.*", "took longer than it may")


# ---- a package of its own -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("toy")
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH", ""), *PATHS)),
    }
    words = [sys.executable, "-m", "support.toy_mutants", str(folder)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.full
def test_the_map_says_which_test_executes_a_line(toy: dict[str, Any]) -> None:
    assert toy["reach"] == {
        "half": ["tests/whole/test_one.py::test_half"],
        "doubled": ["tests/whole/test_one.py::test_doubled"],
        "slow": ["tests/whole/test_one.py::test_process"],  # in a process of its own
    }
    assert toy["reach after lines were added above"] == toy["reach"]
    assert toy["traced again"] == [[], ["whole"]]  # after a change of the package, and of the tests


@pytest.mark.full
def test_mutants_are_tried_and_survivors_meet_the_whole_suite(toy: dict[str, Any]) -> None:
    assert toy["own tests"] == {
        "half": ["killed", "tests/whole/test_one.py::test_half"],
        "doubled": ["survived", ""],
        "slow": ["survived", ""],
    }
    assert toy["whole suite"] == {
        "half": ["killed", "tests/whole/test_one.py::test_half"],
        "doubled": ["killed", "tests/zlast/test_text.py::test_text"],
        "slow": ["survived all", ""],
    }


@pytest.mark.full
def test_how_a_run_ends(toy: dict[str, Any]) -> None:
    endings = toy["endings"]
    assert endings["passes"] == {}
    assert endings["fails"] == {"tests/whole/test_one.py::test_half": "assert 3 == 2"}
    assert endings["hangs in a test"] == {"tests/odd/test_in.py::test_in": "took longer than it may"}
    assert endings["hangs between tests"] == {"(between tests)": "took longer than it may"}
    assert endings["dies in a test"] == {"tests/odd/test_dies.py::test_dies": "ended with code -9"}
    assert endings["dies between tests"] == {"(between tests)": "ended with code -9"}
    assert endings["dies at import"] == {"(between tests)": "ended with code -9"}
    assert list(endings["no import"]) == ["import hydra_ext"]
    assert list(endings["no collection"]) == ["tests/whole/test_one.py"]


def test_a_change_of_the_engine_has_one_place(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("one();\ntwo();\ntwo();\n")
    there = EngineMutation("a.cpp", "one();", "", "nothing")
    assert there.fault(tmp_path) is None
    assert there.place(tmp_path) == "a.cpp:1"
    for text in ("two();", "three();"):
        assert replace(there, before=text).fault(tmp_path) is not None


def test_a_difference_has_no_places() -> None:
    assert difference("a\nb\nc\n", "a\n  d\nc\n") == ("- b", "+ d")


HANGS = """
import sys
from pathlib import Path
from mutants.python_trials import wait
from mutants.trials import Trial
root = Path(sys.argv[1])
patience = lambda name: 1.0 if name.endswith("hangs") else 500.0
ending = wait(Trial(root, ["test_it.py"], root=root, folder=root, limit=500.0, patience=patience))
print(ending.failed, ending.passed)
"""


@pytest.mark.full
def test_a_test_that_hangs_is_not_waited_for_as_long_as_a_run_may_take(tmp_path: Path) -> None:
    (tmp_path / "hydra_ext").mkdir()
    (tmp_path / "hydra_ext" / "__init__.py").touch()
    (tmp_path / "tests").mkdir()
    tests = "def test_one(): pass\ndef test_hangs():\n    while True: pass\ndef test_two(): pass\n"
    (tmp_path / "tests" / "test_it.py").write_text(tests)
    environment = {**os.environ, "PYTHONPATH": PATHS[1]}
    command = [sys.executable, "-W", "ignore", "-c", HANGS, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "{'test_it.py::test_hangs': 'took longer than it may'} ('test_it.py::test_one',)\n"
