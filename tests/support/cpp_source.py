"""Just enough understanding of C++ text for the architecture tests: comments, strings, includes, function lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKENS = re.compile(
    r"""
    //[^\n]* | /\*.*?\*/                                   # comments
    | R"(?P<mark>[^()\s\\]{0,16})\(.*?\)(?P=mark)"         # raw strings
    | "(?:\\.|[^"\\\n])*" | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'   # strings, characters; not 1'000
    """,
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVES = re.compile(r"^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_NO_CALL = re.compile(r"alignas\s*\([^)]*\)|template\s*<[^{]*>\s*(?=class|struct)")
_SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b")


@dataclass(frozen=True)
class Body:
    """A function body, or a block that cannot be told from one, outside any other."""

    head: str
    first_line: int
    last_line: int

    @property
    def lines(self) -> int:
        return self.last_line - self.first_line + 1


def includes(text: str) -> list[str]:
    return _INCLUDE.findall(text)


def strip_comments(text: str) -> str:
    """Blanks comments, keeping strings and line numbers."""
    return _TOKENS.sub(lambda match: _blank(match) if match[0][:2] in ("//", "/*") else match[0], text)


def strip(text: str) -> str:
    """Blanks comments, strings, characters and preprocessor lines, keeping line numbers."""
    return _DIRECTIVES.sub(_blank, _TOKENS.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def bodies(text: str) -> list[Body]:
    """Outermost blocks that are neither a namespace, a type nor an initialiser, by counting braces.

    A body's head is what stands before its brace since the last `;`, `{` or `}`.
    """
    clean = strip(text)
    found: list[Body] = []
    scopes: list[bool] = []  # of every open brace: whether it opens a scope that may hold functions
    head_start, line, first_line, head = 0, 1, 0, ""
    for index, character in enumerate(clean):
        if character == "\n":
            line += 1
        elif character == "{":
            outermost = all(scopes)
            head_text = " ".join(clean[head_start:index].split())
            is_scope = outermost and _opens_scope(head_text)
            if outermost and not is_scope:
                head, first_line = head_text, line
            scopes.append(is_scope)
            head_start = index + 1
        elif character == "}":
            was_scope = scopes.pop() if scopes else True
            if not was_scope and all(scopes) and not head.endswith("="):
                found.append(Body(head, first_line, line))
            head_start = index + 1
        elif character == ";":
            head_start = index + 1
    return found


def _opens_scope(head: str) -> bool:
    """`struct X {` but not `struct X make(struct Y y) {`: a type's head has no parentheses but these."""
    return bool(_SCOPE.search(head)) and "(" not in _NO_CALL.sub("", head)
