"""The translation of CUDA sources for the host: what it makes of launches and shared memory, and what it refuses."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "emulator" / "kernels" / "translate.py"
SOURCES = sorted([*(ROOT / "csrc").rglob("*.cu"), *(ROOT / "tests" / "cpp").rglob("*.cu")])
HEAD = '#include "emulator/kernels/device.h"\n#line 1 "a.cu"\n'
LAUNCH = "::emulated_cuda::kernels::launch_kernel("
SETTINGS = "::emulated_cuda::kernels::Configuration("


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("emulator_translate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["emulator_translate"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


translate = load()


def translated(text: str) -> str:
    result: str = translate.translated(text, "a.cu")
    assert result.startswith(HEAD)
    return result.removeprefix(HEAD)


def refusal(text: str) -> str:
    with pytest.raises(translate.Refusal) as caught:
        translate.translated(text, "a.cu")
    return str(caught.value)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_source_is_translated_line_by_line(source: Path) -> None:
    text = source.read_text()
    result = translated(text)
    assert result.count("\n") == text.count("\n")
    differing = [
        (old, new)
        for old, new in zip(text.splitlines(), result.splitlines(), strict=True)
        if old.strip() != new.strip()
    ]
    assert all(re.search(r"<<<|>>>|__shared__", old) for old, _ in differing)
    code = re.sub(r"//.*", "", result)
    assert "<<<" not in code
    assert "__shared__" not in code


def test_there_are_sources() -> None:
    assert len(SOURCES) >= 4


# ---- launches -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("launch", "name", "settings", "arguments"),
    [
        ("k<<<1, 2>>>()", "k", "1, 2", ""),
        ("k<<<1, 2, 0>>>(a)", "k", "1, 2, 0", "a"),
        ("k<<<grid(x, y), 32 * n, 0U, on>>>(a, b(c, d))", "k", "grid(x, y), 32 * n, 0U, on", "a, b(c, d)"),
        ("k <<< 1, 2 >>> (a)", "k", " 1, 2 ", "a"),
        ("a::b::k<<<1, 2>>>(a)", "a::b::k", "1, 2", "a"),
        ("::a::k<<<1, 2>>>(a)", "::a::k", "1, 2", "a"),
        ("k<int, 3><<<1, 2>>>(a)", "k<int,3>", "1, 2", "a"),
        ("a::k<b<c<unsigned int>>><<<1, 2>>>(a)", "a::k<b<c<unsigned int>>>", "1, 2", "a"),
        ("k<(x > 1 ? 2 : 3)><<<1, 2>>>(a)", "k<(x>1?2:3)>", "1, 2", "a"),
        ("k<<<f<g<h<int>>>(n), 2>>>(a)", "k", "f<g<h<int>>>(n), 2", "a"),
        ("k<<<static_cast<unsigned>(n), 2>>>(a)", "k", "static_cast<unsigned>(n), 2", "a"),
        ("k<<<n >> 3, 1 << 5>>>(a)", "k", "n >> 3, 1 << 5", "a"),
        ("k<<<p->blocks, (a < b ? 1 : 2)>>>(a)", "k", "p->blocks, (a < b ? 1 : 2)", "a"),
        ("k<<<n >= 3, n <= 4>>>(a)", "k", "n >= 3, n <= 4", "a"),
        ("k<<<1, 2>>>(\">>>(\", '<')", "k", "1, 2", "\">>>(\", '<'"),
        ("k<<<1, 2>>>([] { return 1; }())", "k", "1, 2", "[] { return 1; }()"),
    ],
)
def test_launches(launch: str, name: str, settings: str, arguments: str) -> None:
    comma = ", " if arguments else ""
    between = " " if ">>> (" in launch else ""
    wanted = f'{LAUNCH}"{name}", {SETTINGS}{settings}){between}, {name}{comma}{arguments});'
    found = translated(f"void f() {{ {launch}; }}")
    assert re.sub(r"\s+", " ", found) == re.sub(r"\s+", " ", f"void f() {{ {wanted} }}")


def test_a_global_name_is_not_part_of_the_keyword_before_it() -> None:
    found = translated("void f() { if (a) b(); else ::k<<<1, 2>>>(); }")
    assert f'else {LAUNCH}"::k", {SETTINGS}1, 2), ::k);' in found


def test_lines_inside_a_launch_stay() -> None:
    text = "void f() {\n  k<int,\n    3><<<1, // blocks >>>\n    2,\n\n    0>>>(\n    a,  /* ) */\n    b);\n  g();\n}\n"
    found = translated(text)
    assert found.count("\n") == text.count("\n")
    assert found.splitlines()[-2:] == ["  g();", "}"]
    assert found.splitlines()[6].strip() == "a,  /* ) */"


@pytest.mark.parametrize(
    "text",
    [
        "// k<<<1, 2>>>(a);\n",
        "/* k<<<1, 2>>>(a);\n __shared__ int x; */\n",
        'const char* a = "k<<<1, 2>>>(a)";\n',
        'const char* a = R"x(k<<<1, 2>>>(a) ")" __nothing)x";\n',
        "int a = b << 3 >> 2;\nint c = 1'000'000 + '\\'';\n",
        "std::ostream& operator<<<int>(std::ostream& to, A<int> a);\n",
        "B<C<D<int>>> x;\n",
        "// a comment that goes on \\\n k<<<1, 2>>>(a)\n",
        "__device__ bool operator==(A a, A b) { return true; }\n__device__ A::A() : b{1}, c(2) { d(); }\n",
        "#define INLINE __device__ inline\nINLINE int f();\n",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert translated(text) == text


# ---- shared variables -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("int x", "int (&x)"),
        ("float x[4]", "float (&x)[4]"),
        ("unsigned long x[kA * (2 + 3)][b[1]]", "unsigned long (&x)[kA * (2 + 3)][b[1]]"),
        ("const int* x[4]", "const int* (&x)[4]"),
        ("std::pair<int, A<float>> x", "std::pair<int, A<float>> (&x)"),
        ("struct A x[2]", "struct A (&x)[2]"),
    ],
)
def test_shared_variables(before: str, after: str) -> None:
    found = translated(f"__global__ void k() {{\n  __shared__ {before};\n}}\n").splitlines()[1].strip()
    assert found.startswith(f"{after} = ::emulated_cuda::kernels::SharedVariable(")
    assert found.endswith("());")


# ---- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("void f() {\n k<<<1, 2, 64>>>(a); }", 2, "dynamic shared memory"),
        ("void f() {\n k<<<1, 2, bytes, on>>>(a); }", 2, "dynamic shared memory"),
        ("void f() { k<<<1>>>(a); }", 1, "2 to 4 settings"),
        ("void f() { k<<<1, 2, 0, on, 5>>>(a); }", 1, "2 to 4 settings"),
        ("void f() {\n\n k<<<a < b, 2>>>(a); }", 3, "comparisons in it have to stand in brackets"),
        ("void f() { k<<<a > b, 2>>>(a); }", 1, "comparisons in it have to stand in brackets"),
        ("void f() { k<<<1, 2; }", 1, "no >>> closes"),
        ("void f() { k<<<1, 2>>>; }", 1, "no arguments follow"),
        ("void f() { k<<<1, 2>>>(a; }", 1, "no bracket closes"),
        ("void f() { (k)<<<1, 2>>>(a); }", 1, "the name of a kernel"),
        ("void f() { g(); b ><<<1, 2>>>(a); }", 1, "the name of a kernel"),
        ("__global__ void k() {\n  if (a) {}\n  k<<<1, 2>>>(); }", 3, "device code launches"),
        ("__host__ __device__ void k() { j<<<1, 2>>>(); }", 1, "device code launches"),
        ("#define INLINE __device__ inline\nINLINE void f() { j<<<1, 2>>>(); }", 2, "device code launches"),
        ("__device__ A::A() : a{1}, b<c>{2} {\n j<<<1, 2>>>(); }", 2, "device code launches"),
        ("#define RUN(k) \\\n  k<<<1, 2>>>()\n", 2, "a kernel launch in a macro"),
        ("#define SHARED __shared__ int x\n", 1, "a __shared__ variable in a macro"),
        ("__shared__ int x[4];", 1, "outside of device code"),
        ("__global__ void k() {\n  extern __shared__ int x[]; }", 2, "extern stands before"),
        ("__global__ void k() { __shared__ int x = 3; }", 1, "without an initial value"),
        ("__global__ void k() { __shared__ int x = y; }", 1, "without an initial value"),
        ("__global__ void k() { __shared__ int x{3}; }", 1, "without an initial value"),
        ("__global__ void k() { __shared__ int x[2], y; }", 1, "is known"),
        ("__global__ void k() { __shared__ int x, y; }", 1, "is known"),
        ("__global__ void k() { __shared__ x; }", 1, "is known"),
        ("__device__ int x;", 1, "no function"),
        ("__device__ int x = f();", 1, "no function"),
        ("__device__ int x{3};", 1, "no function"),
        ("__constant__ int x;", 1, "does not know __constant__"),
        ("\n#if __CUDA_ARCH__ >= 800\n#endif", 2, "does not know __CUDA_ARCH__"),
        ("__global__ void k() {\n  x = __shfl_xor_sync(m, x, 1); }", 2, "does not know __shfl_xor_sync"),
        ("__launch_bounds__(32) void k();", 1, "does not know __launch_bounds__"),
        ('const char* x = "a;\n', 1, "without an end"),
        ("\n/* a", 2, "without an end"),
        ("__global__ void k(", 1, "no bracket closes"),
        ("__global__ void", 1, "nothing follows"),
    ],
)
def test_refusals(text: str, line: int, reason: str) -> None:
    message = refusal(text)
    assert message.startswith(f"a.cu:{line}: ")
    assert reason in message


def test_known_words_have_a_meaning() -> None:
    """Functions are in device.h; qualifiers, which end in underscores, come from CUDA's headers."""
    text = (SCRIPT.parent / "device.h").read_text()
    functions = {word for word in translate.KNOWN_WORDS if not word.endswith("__")}
    assert functions == set(re.findall(r"^(?:inline )?\w+ (__\w+)\(", text, re.MULTILINE))


# ---- the command ----------------------------------------------------------------------------------------------------
def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_the_command_writes_the_output(tmp_path: Path) -> None:
    source = tmp_path / "a.cu"
    source.write_text("void f() { k<<<1, 2>>>(); }\n")
    output = tmp_path / "folder" / "a.cpp"
    assert run(source, output).returncode == 0
    lines = output.read_text().splitlines()
    assert lines[1] == f'#line 1 "{source}"'
    assert "launch_kernel" in lines[2]


def test_the_command_says_why_it_refuses(tmp_path: Path) -> None:
    source = tmp_path / "a.cu"
    source.write_text("\n__constant__ int x;\n")
    done = run(source, tmp_path / "a.cpp")
    assert done.returncode == 1
    assert done.stderr == f"{source}:2: the emulator does not know __constant__\n"
    assert not (tmp_path / "a.cpp").exists()
