"""Changes of a source text by byte ranges, which ast uses."""

from __future__ import annotations

import ast
import difflib
import types
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Replaces a range of bytes by a text."""

    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


class Ranges:
    """The byte ranges of a source's nodes."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def line(self, offset: int) -> int:
        return self.source.count(b"\n", 0, offset) + 1


def same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether both do the same, independently of line numbers."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")
    if any(getattr(one, name) != getattr(other, name) for name in names) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(_same_constant(*pair) for pair in zip(one.co_consts, other.co_consts, strict=True))


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return same_code(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


def difference(before: str, after: str) -> tuple[str, ...]:
    """Returns removed lines with -, and added lines with +, without line numbers, which other changes would shift."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return tuple(
        line[0] + " " + line[1:].strip() for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")
    )
