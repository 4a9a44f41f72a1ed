"""A minimal parser of C++ text for the architecture tests: comments, strings, includes, function lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
    """A function body, or a block that looks like one, outside of all others."""

    head: str
    first_line: int
    last_line: int

    @property
    def lines(self) -> int:
        return self.last_line - self.first_line + 1


def includes(text: str) -> list[str]:
    return _INCLUDE.findall(text)


def strip_comments(text: str) -> str:
    """Blanks comments; keeps strings and line numbers."""
    return _TOKENS.sub(lambda match: _blank(match) if match[0][:2] in ("//", "/*") else match[0], text)


def strip(text: str) -> str:
    """Blanks comments, strings, characters and preprocessor lines; keeps line numbers."""
    return _DIRECTIVES.sub(_blank, _TOKENS.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def bodies(text: str) -> list[Body]:
    """Finds the outermost blocks that are neither a namespace, a type nor an initialiser, by counting braces.

    A body's head is the text before its brace, from the last `;`, `{` or `}` on.
    """
    clean = strip(text)
    found: list[Body] = []
    scopes: list[bool] = []  # for every open brace, whether it opens a scope that may have functions
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


@dataclass
class ClassShape:
    """The public methods, the fields and the constructor of a class or struct.

    Attributes:
        methods: Names of public member functions, without constructors, destructors and operators.
        fields: Names of data members that are not static.
        parameters: The number of parameters of the longest constructor.
    """

    name: str
    line: int
    methods: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    parameters: int = 0


def classes(text: str) -> list[ClassShape]:
    """Returns the shapes of a header's classes, including nested ones."""
    clean = strip(text)
    found: list[ClassShape] = []
    _read_scope(clean, 0, None, public=True, found=found)
    return found


_TYPE = re.compile(r"\b(?P<kind>class|struct)\s+(?P<name>\w+)(?:\s+final)?\s*(?::(?!:)|$)")
_ACCESS = re.compile(r"\b(public|protected|private)\s*:(?!:)")
_NO_MEMBER = re.compile(r"^(?:using|typedef|friend|static_assert|enum|class|struct|union|namespace|extern|template)\b")


def _read_scope(clean: str, start: int, shape: ClassShape | None, *, public: bool, found: list[ClassShape]) -> int:
    """Reads from behind an opening brace to behind its closing brace, or to the end."""
    begin = index = start
    while index < len(clean):
        character = clean[index]
        if character == "}":
            return index + 1
        access = _ACCESS.match(clean, index) if shape is not None and character in "p" else None
        if access and not clean[begin:index].strip():
            public = access[1] == "public"
            begin = index = access.end()
        elif character == ";":
            _read_member(clean[begin:index], shape, public=public)
            begin = index = index + 1
        elif character == "{":
            head = " ".join(clean[begin:index].split())
            kind = _TYPE.search(_without_arguments(head))
            if kind and "(" not in _without_arguments(head) and not re.search(r"\benum\b", head):
                inner = ClassShape(kind["name"], clean.count("\n", 0, index) + 1)
                found.append(inner)
                begin = index = _read_scope(clean, index + 1, inner, public=kind["kind"] == "struct", found=found)
            elif shape is None and re.search(r"\b(?:namespace|extern)\b", head):
                begin = index = _read_scope(clean, index + 1, None, public=True, found=found)
            else:
                index = _behind_block(clean, index)
                if "(" in _without_arguments(head):  # a function's body, after which no semicolon is needed
                    _read_member(head, shape, public=public)
                    begin = index
        else:
            index += 1
    return index


def _behind_block(clean: str, index: int) -> int:
    depth = 0
    while index < len(clean):
        depth += {"{": 1, "}": -1}.get(clean[index], 0)
        index += 1
        if depth == 0:
            break
    return index


def _without_arguments(head: str) -> str:
    """Removes text in angle brackets, which may have parentheses and commas."""
    while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:
        head = shorter
    return head


def _read_member(statement: str, shape: ClassShape | None, *, public: bool) -> None:
    text = _without_arguments(" ".join(statement.split()))
    text = re.sub(r"^(?:\[\[[^\]]*\]\]|template|explicit|virtual|inline|constexpr|mutable)\s*", "", text)
    if shape is None or not text or _NO_MEMBER.match(text):
        return
    value = re.search(r"[={]", text)
    function = re.search(r"(?P<name>~?\w+)\s*\(", text)
    if function and "operator" not in text and (value is None or function.start() < value.start()):
        name = function["name"]
        if name == shape.name:
            arguments = _flat_arguments(text[function.end() :])
            shape.parameters = max(shape.parameters, arguments.count(",") + 1 if arguments else 0)
        elif public and not name.startswith("~"):
            shape.methods.add(name)
    elif not function and "operator" not in text and not text.startswith("static "):
        declared = re.sub(r"\{[^{}]*\}|=[^,]*", "", text)
        shape.fields |= {name.split()[-1].strip("*&") for name in declared.split(",") if name.split()}


def _flat_arguments(text: str) -> str:
    """Returns the text up to the closing parenthesis, without nested parentheses."""
    depth, kept = 0, ""
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
        kept += character if depth == 0 else ""
    return kept.strip()
