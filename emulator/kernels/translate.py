"""Translates a CUDA source into C++ that runs on the host, on the executor beside this file.

    translate.py SOURCE OUTPUT

A launch `kernel<<<grid, block, 0, stream>>>(arguments)` becomes a call of launch_kernel(), and a `__shared__` variable
a reference to storage of its block. All other text stays, each character on its own line, and a #line directive names
the source. So compilers, debuggers and sanitizers show places in the source.

The text is read token by token. What is not known is refused, with its place and the reason: the output would compile,
and mean something else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["KNOWN_WORDS", "Refusal", "translated"]

# The words with two leading underscores that a source may use: device.h and CUDA's headers give them a meaning.
KNOWN_WORDS = frozenset(
    {
        "__ballot_sync",
        "__device__",
        "__forceinline__",
        "__global__",
        "__host__",
        "__reduce_add_sync",
        "__reduce_max_sync",
        "__reduce_min_sync",
        "__shared__",
        "__shfl_down_sync",
        "__syncthreads",
        "__syncwarp",
    }
)
_NAMESPACE = "::emulated_cuda::kernels::"

_TOKEN = re.compile(
    r"""
      (?P<newline>\n)
    | (?P<space>(?:[^\S\n]|\\\n)+)
    | (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
    | (?P<string>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
                |(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"
                |(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
    | (?P<number>\.?[0-9](?:[eEpP][+-]|'?\w|\.)*)
    | (?P<word>[^\W\d]\w*)
    | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class Refusal(Exception):
    """A text that cannot be translated; the message begins with its file and line."""


@dataclass(frozen=True)
class Token:
    """A word, number, string or single sign. Comments and spaces are none."""

    kind: str
    text: str
    begin: int
    line: int
    in_directive: bool

    @property
    def end(self) -> int:
        return self.begin + len(self.text)


def _tokens(text: str, path: str) -> Iterator[Token]:
    line, begins_line, in_directive = 1, True, False
    for match in _TOKEN.finditer(text):
        kind, found = match.lastgroup or "", match[0]
        kind = "string" if kind == "mark" else kind
        if kind == "sign" and (found in "\"'" or text.startswith("/*", match.start())):
            raise Refusal(f"{path}:{line}: a string, character or comment without an end")
        if kind == "newline":
            begins_line, in_directive = True, False
        elif kind not in ("space", "comment"):
            in_directive = in_directive or (begins_line and found == "#")
            begins_line = False
            yield Token(kind, found, match.start(), line, in_directive)
        line += found.count("\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass
class _Translation:
    text: str
    path: str
    tokens: list[Token] = field(default_factory=list)
    edits: list[tuple[int, int, str]] = field(default_factory=list)  # begin, end, new text

    def run(self) -> str:
        self.tokens = list(_tokens(self.text, self.path))
        in_device_code = self.device_code()
        for at, token in enumerate(self.tokens):
            if token.kind == "word" and token.text.startswith("__") and token.text not in KNOWN_WORDS:
                raise self.refusal(at, f"the emulator does not know {token.text}")
            if self.is_run(at, "<", 3) and not self.follows_operator(at):
                self.refuse_macro(at, "a kernel launch")
                if in_device_code[at]:
                    raise self.refusal(at, "device code launches a kernel")
                self.translate_launch(at)
            elif token.kind == "word" and token.text == "__shared__":
                self.refuse_macro(at, "a __shared__ variable")
                if not in_device_code[at]:
                    raise self.refusal(at, "a __shared__ variable outside of device code")
                self.translate_shared(at)
        return f'#include "emulator/kernels/device.h"\n#line 1 {_quoted(self.path)}\n{self.edited()}'

    def edited(self) -> str:
        parts, at = [], 0
        for begin, end, new in sorted(self.edits):
            parts += [self.text[at:begin], new]
            at = end
        return "".join([*parts, self.text[at:]])

    # ---- tokens -----------------------------------------------------------------------------------------------------
    def refusal(self, at: int, reason: str) -> Refusal:
        line = self.tokens[min(at, len(self.tokens) - 1)].line
        return Refusal(f"{self.path}:{line}: {reason}")

    def refuse_macro(self, at: int, what: str) -> None:
        if self.tokens[at].in_directive:
            raise self.refusal(at, f"{what} in a macro")

    def sign(self, at: int) -> str:
        """The sign at this place, or nothing."""
        known = 0 <= at < len(self.tokens) and self.tokens[at].kind == "sign"
        return self.tokens[at].text if known else ""

    def is_word(self, at: int) -> bool:
        return 0 <= at < len(self.tokens) and self.tokens[at].kind == "word"

    def is_run(self, at: int, sign: str, count: int) -> bool:
        """Whether the same sign follows itself so many times, without a gap."""
        run = self.tokens[at : at + count]
        return len(run) == count and all(
            token.kind == "sign" and token.text == sign and token.begin == run[0].begin + place
            for place, token in enumerate(run)
        )

    def follows_operator(self, at: int) -> bool:
        """Whether signs belong to the name of an operator, such as operator<<."""
        while self.sign(at) in ("<", ">", "=", "-") and self.sign(at - 1) in ("<", ">", "=", "-"):
            at -= 1
        return self.is_word(at - 1) and self.tokens[at - 1].text == "operator"

    def closer(self, at: int) -> int:
        """The place of the bracket that closes the one at this place."""
        open_: list[str] = []
        for place in range(at, len(self.tokens)):
            sign = self.sign(place)
            if sign in _CLOSERS:
                open_.append(_CLOSERS[sign])
            elif sign and sign in ")]}":
                if sign != open_.pop():
                    break
                if not open_:
                    return place
        raise self.refusal(at, f"no bracket closes this {self.sign(at)}")

    # ---- device code ------------------------------------------------------------------------------------------------
    def device_code(self) -> list[bool]:
        """For each token, whether it is in the body of a function for the device."""
        inside = [False] * len(self.tokens)
        specifiers = {"__device__", "__global__"}
        macro = ""
        for at, token in enumerate(self.tokens):
            if token.in_directive:
                macro = self.tokens[at - 1].text if self.is_word(at - 2) and self.defines(at - 2) else macro
                if token.text in specifiers:
                    specifiers.add(macro)
            elif token.kind == "word" and token.text in specifiers:
                begin, end = self.body(at)
                inside[begin:end] = [True] * (end - begin)
        return inside

    def defines(self, at: int) -> bool:
        return self.tokens[at].text == "define" and self.sign(at - 1) == "#" and self.tokens[at].in_directive

    def body(self, at: int) -> tuple[int, int]:
        """The places of a function's body; equal if it is only declared."""
        place, has_parameters, has_initialisers = at, False, False
        while place < len(self.tokens):
            sign = self.sign(place)
            if not has_parameters and (sign in ("{", ";") or (sign == "=" and not self.follows_operator(place))):
                raise self.refusal(at, f"{self.tokens[at].text} stands before something that is no function")
            if sign == ";":
                return place, place
            if sign == ":" and has_parameters:
                has_initialisers = has_initialisers or ":" not in (self.sign(place - 1), self.sign(place + 1))
            if sign == "{" and not (has_initialisers and (self.is_word(place - 1) or self.sign(place - 1) == ">")):
                return place, self.closer(place)
            if sign in _CLOSERS:
                has_parameters = has_parameters or sign == "("
                place = self.closer(place)
            place += 1
        raise self.refusal(at, f"nothing follows {self.tokens[at].text}")

    # ---- launches ---------------------------------------------------------------------------------------------------
    def translate_launch(self, at: int) -> None:
        """`at` is the place of <<<."""
        begin = self.kernel(at)
        close, commas = self.configuration(at + 3)
        arguments = close + 3
        if self.sign(arguments) != "(":
            raise self.refusal(close, "no arguments follow >>>")
        if not 1 <= len(commas) <= 3:
            raise self.refusal(at, "a launch has 2 to 4 settings between <<< and >>>")
        if len(commas) > 1:
            memory = self.tokens[commas[1] + 1 : commas[2] if len(commas) == 3 else close]
            if [token.text.rstrip("uUlLzZ") for token in memory] != ["0"]:
                raise self.refusal(commas[1] + 1, "dynamic shared memory: the third setting has to be 0")
        name = "".join(
            token.text if token.kind != "word" or not self.is_word(place - 1) else f" {token.text}"
            for place, token in enumerate(self.tokens[begin:at], begin)
        ).strip()
        first, last = self.tokens[begin].begin, self.tokens[at + 2].end
        lines = "\n" * self.text.count("\n", first, last)
        call = f"{_NAMESPACE}launch_kernel({_quoted(name)}, {_NAMESPACE}Configuration("
        self.edits.append((first, last, call + lines))
        self.edits.append((self.tokens[close].begin, self.tokens[close + 2].end, ")"))
        comma = ", " if self.closer(arguments) > arguments + 1 else ""
        self.edits.append((self.tokens[arguments].begin, self.tokens[arguments].end, f", {name}{comma}"))

    def kernel(self, at: int) -> int:
        """The place where the kernel's name begins, which ends before `at`: a::b<c>."""
        place = at - 1
        if self.sign(place) == ">":
            depth = {">": 0, ")": 0}  # closed, and not yet opened
            while place >= 0 and self.sign(place) not in (";", "{", "}"):
                sign = self.sign(place)
                depth[")"] += {")": 1, "(": -1}.get(sign, 0)
                depth[">"] += {">": 1, "<": -1}.get(sign, 0) if depth[")"] == 0 else 0
                if depth[">"] == 0:
                    break
                place -= 1
            place = place - 1 if depth[">"] == 0 else -1
        if not self.is_word(place):
            raise self.refusal(at, "the name of a kernel has to stand before <<<")
        while self.sign(place - 1) == ":" and self.sign(place - 2) == ":":
            qualified = self.is_word(place - 3) and self.tokens[place - 3].text not in ("do", "else", "return")
            place -= 3 if qualified else 2
        return place

    def configuration(self, at: int) -> tuple[int, list[int]]:
        """The place of the >>> that closes the settings which begin at `at`, and of the commas between them."""
        commas: list[int] = []
        depth, place = 0, at  # open < of templates
        while place < len(self.tokens):
            sign = self.sign(place)
            if depth == 0 and self.is_run(place, ">", 3):
                return place, commas
            if sign in ("<", ">") and (self.sign(place - 1) == "-" or self.sign(place + 1) == "="):
                pass  # -> <= >=
            elif depth == 0 and (self.is_run(place, "<", 2) or self.is_run(place, ">", 2)):
                place += 1  # a shift
            elif sign == "<":
                depth += 1
            elif sign == ">":
                depth -= 1
            elif sign == "," and depth == 0:
                commas.append(place)
            elif sign in _CLOSERS:
                place = self.closer(place)
            elif (sign and sign in ")]};") or depth < 0:
                break
            place += 1
        raise self.refusal(at, "no >>> closes this launch; comparisons in it have to stand in brackets")

    # ---- shared variables -------------------------------------------------------------------------------------------
    def translate_shared(self, at: int) -> None:
        """`__shared__ T name[N];` becomes `T (&name)[N] = SharedVariable(key);`, with one key for each variable."""
        if self.is_word(at - 1):
            raise self.refusal(at, f"{self.tokens[at - 1].text} stands before __shared__")
        end = at
        while end < len(self.tokens) and self.sign(end) != ";":
            end += 1
        extent = next((place for place in range(at, end) if self.sign(place) == "["), end)
        name = extent - 1
        after_type = self.sign(name - 1) in ("*", ">") or (self.is_word(name - 1) and name - 1 > at)
        place = extent
        while self.sign(place) == "[" and place < end:
            place = self.closer(place) + 1
        if end == len(self.tokens) or not self.is_word(name) or not after_type or place != end:
            raise self.refusal(at, "only `__shared__ type name[extent]...;` is known, without an initial value")
        self.edits.append((self.tokens[at].begin, self.tokens[at].end, ""))
        self.edits.append((self.tokens[name].begin, self.tokens[name].end, f"(&{self.tokens[name].text})"))
        key = "[] { static constexpr char key = 0; return &key; }()"
        self.edits.append((self.tokens[end].begin, self.tokens[end].begin, f" = {_NAMESPACE}SharedVariable({key})"))


def translated(text: str, path: str) -> str:
    """The C++ text of a CUDA source. `path` is what the compiler is to call it. Raises Refusal."""
    return _Translation(text, path).run()


def main() -> None:
    source, output = sys.argv[1:]
    try:
        text = translated(Path(source).read_text(), source)
    except Refusal as refusal:
        sys.exit(str(refusal))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text)


if __name__ == "__main__":
    main()
