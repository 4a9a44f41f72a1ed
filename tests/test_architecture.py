"""The rules that keep the code base small: layers, lengths, names, and what must not appear."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import cpp_source

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
EMULATOR = ROOT / "emulator"
PACKAGE = ROOT / "hydra_ext"

# ---- the layers -----------------------------------------------------------------------------------------------------
_CORE = ("base", "memory", "io", "transfer", "paging", "codec", "optim", "plan", "schedule")
# A folder of csrc/ and what it may include besides itself. A new folder is entered here.
CPP_LAYERS: dict[str, tuple[str, ...]] = {
    "base": (),
    "memory": ("base",),
    "io": ("base",),
    "transfer": ("base", "memory", "io"),
    "paging": ("base", "memory", "io", "transfer"),
    "codec": ("base",),
    "data": ("base",),
    "optim": ("base",),
    "plan": ("base",),
    "schedule": ("base", "plan"),
    "testing": ("base", "memory", "io", "transfer", "paging", "plan"),
    "pytorch": _CORE,
    "bindings": (*_CORE, "data", "testing", "pytorch"),
}
TORCH_FOLDERS = ("pytorch", "bindings")
TORCH_INCLUDE = re.compile(r"^(ATen|c10|torch|caffe2|pybind11)/|^Python\.h$")

# Modules and folders of hydra_ext, lowest first: each imports only from lines above its own, and from itself.
PYTHON_LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "_build_info", "_guard"),
    ("policy", "tracing", "calls", "outputs", "notebooks"),
    ("_C",),
    ("codec", "state"),
    ("blocks", "heads"),
    ("profile",),
    ("schedule",),
    ("plan",),
    ("optim", "activations"),
    ("tables",),
    ("checkpoint",),
    ("construction",),
    ("runtime",),
    ("split",),
    ("offload", "stash", "pipeline", "data", "tiled"),
    ("fleet",),
    ("integrations",),
    ("cli",),
    ("__init__", "__main__"),
)

# Folders of emulator/, lowest first: each includes only from those before it, and from itself. Nothing of csrc/.
EMULATOR_LAYERS = ("cudart", "kernels", "c10_cuda", "nccl", "torch", "python")

# ---- the limits -----------------------------------------------------------------------------------------------------
MAX_FILE_LINES = 600
MAX_BINDINGS_LINES = 150
MAX_FUNCTION_LINES = 60

# Model families and libraries on top of torch. The engine knows modules only; integrations/ knows libraries.
FOREIGN_NAMES = re.compile(
    r"(?<![a-z])(?:gpt|llama|(?:ro|distil|al)?bert|whisper|mixtral|mistral|qwen|gemma|deepseek|resnet|transformers|peft"
    r"|diffusers|lightning|deepspeed|megatron)|(?<![a-z0-9])(?:t5|vit)(?![a-z])",
    re.IGNORECASE,
)
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "joblib"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")


def cpp_files(*suffixes: str) -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (suffixes or (".h", ".cpp", ".cu", ".cuh")))


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def is_generated(path: Path) -> bool:
    return path.name == "_build_info.py"


def shown(path: Path, line: int | None = None) -> str:
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line is not None else "")


def matches(pattern: re.Pattern[str], path: Path, text: str) -> list[str]:
    lines = enumerate(text.splitlines(), 1)
    return [f"{shown(path, number)}: {found[0]}" for number, line in lines for found in pattern.finditer(line)]


# ---- C++ ------------------------------------------------------------------------------------------------------------
def test_cpp_includes_follow_the_layers() -> None:
    faults = []
    for path in cpp_files():
        folder = path.relative_to(CSRC).parts[0]
        if folder not in CPP_LAYERS:
            faults.append(f"{shown(path)}: enter csrc/{folder} in CPP_LAYERS")
            continue
        for include in cpp_source.includes(path.read_text()):
            parts = include.split("/")
            if parts[0] == "csrc" and parts[1] not in (folder, *CPP_LAYERS[folder]):
                faults.append(f"{shown(path)}: {include}")
    assert not faults


def emulator_files() -> list[Path]:
    return sorted(path for path in EMULATOR.rglob("*") if path.suffix in (".h", ".cpp"))


def test_the_emulator_includes_by_its_layers_and_nothing_of_the_engine() -> None:
    faults = []
    for path in emulator_files():
        rank = EMULATOR_LAYERS.index(path.relative_to(EMULATOR).parts[0])
        for include in cpp_source.includes(path.read_text()):
            parts = include.split("/")
            above = parts[0] == "emulator" and EMULATOR_LAYERS.index(parts[1]) > rank
            if parts[0] == "csrc" or above or (rank < 2 and TORCH_INCLUDE.search(include)):
                faults.append(f"{shown(path)}: {include}")
    assert not faults


def test_the_engine_knows_nothing_of_the_emulator() -> None:
    paths = [*cpp_files(), *python_files()]
    assert not [shown(path) for path in paths if re.search(r"emulator/|emulated_cuda", path.read_text())]


def test_only_two_folders_see_torch_and_pybind() -> None:
    faults = []
    for path in cpp_files():
        folder = path.relative_to(CSRC).parts[0]
        for include in cpp_source.includes(path.read_text()):
            allowed = folder in TORCH_FOLDERS and path.suffix not in (".cu", ".cuh")
            if TORCH_INCLUDE.search(include) and not allowed:
                faults.append(f"{shown(path)}: {include}")
            if include == "torch/extension.h":
                faults.append(f"{shown(path)}: {include}: torch/csrc/utils/pybind.h compiles three times as fast")
    assert not faults


def test_our_own_headers_are_included_by_their_path() -> None:
    names = {path.name for path in cpp_files(".h", ".cuh")}
    faults = [
        f"{shown(path)}: {include}"
        for path in cpp_files()
        for include in cpp_source.includes(path.read_text())
        if not include.startswith("csrc/") and include in names
    ]
    assert not faults


def test_every_header_opens_with_a_comment() -> None:
    headers = [path for path in [*cpp_files(), *emulator_files()] if path.suffix in (".h", ".cuh")]
    faults = [shown(path) for path in headers if not path.read_text().startswith("//")]
    assert not faults


def test_cpp_functions_are_short() -> None:
    tests = sorted(path for path in (ROOT / "tests" / "cpp").rglob("*") if path.is_file())
    files = [*cpp_files(), *emulator_files(), *tests]
    faults = [
        f"{shown(path, body.first_line)}: {body.lines} lines: {body.head[-60:]}"
        for path in files
        for body in cpp_source.bodies(path.read_text())
        if body.lines > MAX_FUNCTION_LINES
    ]
    assert not faults


def test_cpp_does_not_print_or_abort() -> None:
    pattern = re.compile(r"\b(?:assert|[fv]?printf|f?puts|abort)\s*\(|\bstd::(?:cout|cerr|clog)\b")
    faults = [fault for path in cpp_files() for fault in matches(pattern, path, cpp_source.strip(path.read_text()))]
    assert not faults


def test_every_source_is_built() -> None:
    text = "".join((ROOT / name).read_text() for name in ("CMakeLists.txt", "emulator/sources.cmake"))
    listed = set(re.findall(r"\b(?:csrc|emulator|tests/cpp)/[\w/.]+\.(?:cpp|cu)\b", text))
    paths = [path for folder in ("csrc", "emulator", "tests/cpp") for path in (ROOT / folder).rglob("*")]
    there = {path.relative_to(ROOT).as_posix() for path in paths if path.suffix in (".cpp", ".cu")}
    assert listed == there, f"not built: {sorted(there - listed)}; not there: {sorted(listed - there)}"


# ---- Python ---------------------------------------------------------------------------------------------------------
def layer_of(name: str) -> int | None:
    return next((rank for rank, names in enumerate(PYTHON_LAYERS) if name in names), None)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and the modules or folders of hydra_ext that are imported there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "hydra_ext":
                    yield node.lineno, parts[1] if len(parts) > 1 else "__init__"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hydra_ext":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from ((node.lineno, name if layer_of(name) is not None else "__init__") for name in names)


def test_python_imports_follow_the_layers() -> None:
    faults = []
    for path in python_files():
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        rank = layer_of(own)
        if rank is None:
            faults.append(f"{shown(path)}: enter hydra_ext.{own} in PYTHON_LAYERS")
            continue
        for line, name in imported(ast.parse(path.read_text())):
            other = layer_of(name)
            if name != own and (other is None or other >= rank):
                faults.append(f"{shown(path, line)}: {own} imports {name}")
    assert not faults


def test_python_imports_are_absolute() -> None:
    faults = [
        shown(path, node.lineno)
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not faults


def test_python_functions_are_short() -> None:
    faults = []
    for path in [*python_files(), *sorted(EMULATOR.rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    faults.append(f"{shown(path, node.lineno)}: {node.name}: {lines} lines")
    assert not faults


def called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func)


def test_python_has_no_assert_print_pickle_or_torch_load() -> None:
    faults = []
    for path in python_files():
        in_cli = path.is_relative_to(PACKAGE / "cli")
        for node in ast.walk(ast.parse(path.read_text())):
            name = called(node)
            if name in ("torch.load", "torch.save") or (name == "print" and not in_cli):
                faults.append(f"{shown(path, node.lineno)}: {name}")
            elif isinstance(node, ast.Assert):
                faults.append(f"{shown(path, node.lineno)}: assert")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                if path.is_relative_to(PACKAGE / "data" / "workers"):
                    continue  # objects that travel between a process and its own workers
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                faults += [f"{shown(path, node.lineno)}: {module}" for module in modules & PICKLES]
    assert not faults


# ---- both -----------------------------------------------------------------------------------------------------------
def all_sources() -> list[Path]:
    tests = [path for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    emulator = [*emulator_files(), *EMULATOR.rglob("*.py")]
    return [path for path in [*cpp_files(), *python_files(), *emulator, *sorted(tests)] if not is_generated(path)]


def test_files_are_short() -> None:
    faults = []
    for path in all_sources():
        limit = MAX_BINDINGS_LINES if path.is_relative_to(CSRC / "bindings") else MAX_FILE_LINES
        lines = len(path.read_text().splitlines())
        if lines > limit:
            faults.append(f"{shown(path)}: {lines} lines, {limit} are allowed")
    assert not faults


def test_no_model_or_library_is_named_outside_integrations() -> None:
    faults = [
        fault
        for path in [*cpp_files(), *python_files()]
        if not path.is_relative_to(PACKAGE / "integrations")
        for fault in matches(FOREIGN_NAMES, path, path.read_text())
    ]
    assert not faults


def test_nothing_is_left_unfinished() -> None:
    paths = [path for path in all_sources() if path != Path(__file__).resolve()]
    assert not [fault for path in paths for fault in matches(UNFINISHED, path, path.read_text())]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a GPT-2 step", True),
        ("LlamaForCausalLM", True),
        ("from transformers import x", True),
        ("T5", True),
        ("vit_base", True),
        ("a transformer block", False),
        ("Hilbert", False),
        ("vital", False),
        ("float32", False),
    ],
)
def test_foreign_names_are_recognised(text: str, found: bool) -> None:
    assert bool(FOREIGN_NAMES.search(text)) is found
