"""The runner of mutations: what it changes, what it draws, and what it remembers."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from mutants import drawing, operators
from mutants.edits import difference
from mutants.engine_mutation import EngineMutation
from mutants.results import Outcome, Result, Results

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


def test_results_outlast_a_change_of_the_tests_only_for_what_was_killed(tmp_path: Path) -> None:
    killed = Result("k", "python", "f.py:1", "f", ("- a", "+ b"), Outcome.KILLED, "test", "why", 3, 1.0, "", "")
    results = Results(tmp_path / "results", sources="s", suite="t")
    results.add(killed)
    results.add(replace(killed, key="l", outcome=Outcome.SURVIVED))
    again = Results(tmp_path / "results", sources="s", suite="t")
    assert [getattr(again.get(key), "outcome", None) for key in "kl"] == [Outcome.KILLED, Outcome.SURVIVED]
    other_tests = Results(tmp_path / "results", sources="s", suite="u")
    assert [getattr(other_tests.get(key), "outcome", None) for key in "kl"] == [Outcome.KILLED, None]
    other_sources = Results(tmp_path / "results", sources="r", suite="t")
    assert [other_sources.get(key) for key in "kl"] == [None, None]


def test_a_change_of_the_engine_has_one_place(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("one();\ntwo();\ntwo();\n")
    there = EngineMutation("a.cpp", "one();", "", "nothing")
    assert there.fault(tmp_path) is None
    assert there.place(tmp_path) == "a.cpp:1"
    for text in ("two();", "three();"):
        assert replace(there, before=text).fault(tmp_path) is not None


def test_a_difference_has_no_places() -> None:
    assert difference("a\nb\nc\n", "a\n  d\nc\n") == ("- b", "+ d")
