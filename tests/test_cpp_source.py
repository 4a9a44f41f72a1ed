"""The measure that the architecture tests apply to C++."""

from support import cpp_source

TEXT = """\
#include <vector>
#include "csrc/base/types.h"
#define MACRO(x) \\
  do {           \\
  } while (0)

namespace hydra { // {
struct A final : B {
  int small() const { return '{' + 1'000; }
  std::vector<int> list = {1, 2};
};
template <typename T>
class alignas(64) C {};
constexpr int kTable[] = {
  1,
  2,
};
A::A(int x)
    : x_{x},
      y_("}") {
  if (x) {
    run([&] {
      stop();
    });
  }
}
std::string raw() {
  return R"json({"a": {)json";
}
}  // namespace hydra
"""


def test_bodies_are_measured_by_their_braces() -> None:
    found = [(body.head.split("(")[0].split()[-1:], body.lines) for body in cpp_source.bodies(TEXT)]
    lengths = [lines for _, lines in found]
    assert max(lengths) == 7  # the constructor, from its brace on
    assert (["small"], 1) in found
    assert (["raw"], 3) in found
    assert not any("kTable" in body.head for body in cpp_source.bodies(TEXT))


def test_includes() -> None:
    assert cpp_source.includes(TEXT) == ["vector", "csrc/base/types.h"]


def test_stripping_keeps_lines() -> None:
    assert cpp_source.strip(TEXT).count("\n") == TEXT.count("\n")
    assert "// {" not in cpp_source.strip_comments(TEXT)
    assert '"}"' in cpp_source.strip_comments(TEXT)
