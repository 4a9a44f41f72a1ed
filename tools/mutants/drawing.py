"""Draws mutants of a package by a seed, in proportion to the lines of its files."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mutants import operators
from mutants.edits import Edit, Ranges, difference, same_code


@dataclass(frozen=True)
class Mutant:
    """A change of one file: its place, and the whole changed file."""

    file: str
    function: str
    line: int
    reached_by: range  # a test that executes one of these lines may find it
    change: tuple[str, ...]
    edit: Edit
    text: str
    occurrence: int = 0  # index among the same changes of the same function, from the top

    @cached_property
    def key(self) -> str:
        """Identifies the change of the function, independently of line numbers."""
        number = (str(self.occurrence),) if self.occurrence else ()
        words = "\n".join((self.file, self.function, *self.change, *number))
        return hashlib.sha256(words.encode()).hexdigest()[:12]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class Source:
    """A file of the package, and the possible changes on each of its lines."""

    def __init__(self, root: Path, path: Path) -> None:
        self.file = path.relative_to(root).as_posix()
        self._bytes = path.read_bytes()
        self.lines = len(self._bytes.splitlines())

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self._bytes)

    @cached_property
    def _edits(self) -> dict[int, list[Edit]]:
        ranges, found = Ranges(self._bytes), dict[int, list[Edit]]()
        for edit in operators.edits(self._bytes):
            found.setdefault(ranges.line(edit.start), []).append(edit)
        return found

    def draw(self, numbers: random.Random) -> Mutant | None:
        """Draws a change of a random line that has any. Returns None if there is none, or if it changes no code."""
        if not self._edits:
            return None
        return self.mutant(numbers.choice(self._edits[numbers.choice(sorted(self._edits))]))

    def all_mutants(self) -> Iterator[Mutant]:
        for edits in self._edits.values():
            yield from filter(None, map(self.mutant, edits))

    def mutant(self, edit: Edit) -> Mutant | None:
        changed = edit.applied(self._bytes)
        try:
            before, after = (compile(text, self.file, "exec", dont_inherit=True) for text in (self._bytes, changed))
        except (SyntaxError, ValueError):
            return None
        if same_code(before, after):
            return None
        line = Ranges(self._bytes).line(edit.start)
        around = self._around(line)
        scopes = _scopes(around)
        text = changed.decode()
        return Mutant(
            file=self.file,
            function=".".join(scope.name for scope in scopes),
            line=line,
            reached_by=self._reached_by(around, scopes[-1] if scopes else None),
            change=difference(self._bytes.decode(), text),
            edit=edit,
            text=text,
            occurrence=self._occurrence(edit, line),
        )

    def _occurrence(self, edit: Edit, line: int) -> int:
        """Counts the equal lines above it in the same function that could be changed in the same way."""
        texts = self._bytes.decode().splitlines()
        scope = _scopes(self._around(line))
        lines = [n for n in self._edits if n < line and texts[n - 1].strip() == texts[line - 1].strip()]
        before = self._bytes.decode()
        change = difference(before, edit.applied(self._bytes).decode())
        return sum(
            any(difference(before, other.applied(self._bytes).decode()) == change for other in self._edits[n])
            for n in lines
            if _scopes(self._around(n)) == scope
        )

    def _around(self, line: int) -> list[ast.stmt]:
        """The statements around a line, outermost first."""
        found: list[ast.stmt] = []
        inside: list[ast.AST] = [self._tree]
        while inside:
            children = [child for node in inside for child in ast.iter_child_nodes(node)]
            statements = [node for node in children if isinstance(node, ast.stmt)]
            here = [node for node in statements if _first_line(node) <= line <= (node.end_lineno or 0)]
            found += here
            inside = [*here] or [node for node in children if isinstance(node, ast.ExceptHandler | ast.match_case)]
        return found

    def _reached_by(self, around: list[ast.stmt], scope: ast.stmt | None) -> range:
        """Returns the lines of the statement. For code that runs at import, the lines of the class or the file."""
        statement = around[-1]
        if statement is not scope and not isinstance(scope, ast.ClassDef | None):
            body: list[ast.stmt] = getattr(statement, "body", [])
            return range(statement.lineno, (body[0].lineno if body else (statement.end_lineno or 0) + 1))
        if scope is None:
            return range(1, self.lines + 1)
        return range(scope.lineno, (scope.end_lineno or 0) + 1)


def _scopes(around: list[ast.stmt]) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in around if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def sources(root: Path) -> list[Source]:
    """Returns the files of the package, without those that a build writes."""
    paths = sorted((root / "hydra_ext").rglob("*.py"))
    return [Source(root, path) for path in paths if path.name != "_build_info.py"]


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Returns the first ``count`` mutants that the seed draws. A larger count begins with the same ones."""
    numbers = random.Random(seed)
    files = sources(root)
    weights = [file.lines for file in files]
    drawn: dict[str, Mutant] = {}
    while len(drawn) < count:
        (file,) = numbers.choices(files, weights)
        mutant = file.draw(numbers)
        if mutant is not None:
            drawn.setdefault(mutant.key, mutant)
    return list(drawn.values())
