"""Classes stay small: what is above the limits is listed with its reason, and the list may only shrink."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import cpp_source

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("large_classes.txt")
METHODS, FIELDS, PARAMETERS = 15, 12, 8  # public ones; of the constructor


@dataclass(frozen=True)
class Size:
    name: str  # file:class
    methods: int
    fields: int
    parameters: int

    @property
    def is_large(self) -> bool:
        return self.methods > METHODS or self.fields > FIELDS or self.parameters > PARAMETERS

    def __str__(self) -> str:
        return f"{self.name} {self.methods} {self.fields} {self.parameters}"


def python_sizes(text: str, name: str) -> Iterator[Size]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            functions = [part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
            fields = {field for function in functions for field in _set_on_self(function)}
            parameters = 0
            if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                declared = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                own = [part for part in declared if "ClassVar" not in ast.unparse(part.annotation)]
                fields |= {ast.unparse(part.target) for part in own}
                parameters = sum(part.value is None or "init=False" not in ast.unparse(part.value) for part in own)
            for function in functions:
                if function.name == "__init__":
                    arguments = function.args
                    parameters = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
            methods = {function.name for function in functions if not function.name.startswith("_")}
            yield Size(f"{name}:{node.name}", len(methods), len(fields), parameters)


def _set_on_self(function: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def cpp_sizes(text: str, name: str) -> Iterator[Size]:
    for shape in cpp_source.classes(text):
        yield Size(f"{name}:{shape.name}", len(shape.methods), len(shape.fields), shape.parameters)


def all_sizes() -> Iterator[Size]:
    for path in sorted((ROOT / "hydra_ext").rglob("*.py")):
        yield from python_sizes(path.read_text(), path.relative_to(ROOT).as_posix())
    for path in sorted((ROOT / "csrc").rglob("*.h")):
        yield from cpp_sizes(path.read_text(), path.relative_to(ROOT).as_posix())


def test_classes_above_the_limits_are_those_of_the_list() -> None:
    """Each line there: the class, its public methods, fields and constructor's parameters, and why it is so."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    listed = {line.partition(": ")[0] for line in lines}
    assert all(line.partition(": ")[2] for line in lines), "each needs its reason"
    found = {str(size) for size in all_sizes() if size.is_large}
    assert not found - listed, "new, or larger than before: make it smaller"
    assert not listed - found, "smaller than before: the list shrinks with it"


PYTHON = """
class Plain(Base):
    shared: int = 0

    def __init__(self, a, *, b=0):
        self.a, self._b = a, b
        self.items[0] = a

    def method(self):
        self.c: int = 1
        self.a += 1

    @property
    def seen(self): ...

    def _own(self): ...

@dataclass(frozen=True)
class Data:
    x: int
    y: int = field(default=0, init=False)
    shared: ClassVar[int] = 0
"""
CPP = """
namespace n {
class Forward;
enum class Kind : std::uint8_t { kOne, kTwo };
template <class T>
class Box final : public Base<T, 2> {
 public:
  struct Inner { int a = 0; std::vector<int> b{1, 2}; };
  using Work = std::function<void(int, int)>;
  Box();
  explicit Box(std::map<int, int> a, int b = f(1), int c = 2) : a_(b) { a_ = {}; }
  ~Box();
  Box& operator=(const Box&) = delete;
  int size() const noexcept { return size_; }
  [[nodiscard]] std::map<int, int> all(int x, int y = 2) const;
  void all();
  static Box make(std::function<int(int)> work);
  int shown = 0;

 private:
  void hide();
  std::function<void(int, int)> work_;
  mutable std::mutex mutex_;
  std::array<std::pair<int, int>, 3> pairs_ = {};
  int a_{1}, b_ = 2;
  static constexpr int kLimit = 3;
  friend class Other;
};
}  // namespace n
"""


@pytest.mark.parametrize(
    ("sizes", "text", "expected"),
    [
        (python_sizes, PYTHON, ["f:Plain 2 3 2", "f:Data 0 2 1"]),
        (cpp_sizes, CPP, ["f:Box 3 6 3", "f:Inner 0 2 0"]),
    ],
)
def test_what_is_counted(sizes: object, text: str, expected: list[str]) -> None:
    assert [str(size) for size in sizes(text, "f")] == expected  # type: ignore[operator]
