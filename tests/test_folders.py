"""A folder is a room: neither a hall nor a cupboard, and its first paragraph says what lives there."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEWEST, MOST = 4, 14  # units: a header and its source are one
GENERATED = {"_C", "_build_info"}
# Smaller ones, with what is to keep them apart.
SMALL = {
    "csrc/bindings": "the module, above its three folders",
    "csrc/data": "the only memory that other processes write to",
    "csrc/pytorch/threads": "what all other folders of pytorch need, and no memory",
    "hydra_ext/_C": "generated stubs",
    "hydra_ext/cli/demo": "one command",
}


def units(folder: Path) -> set[str]:
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".so")
    return {path.stem for path in files} - GENERATED


def folders() -> dict[str, int]:
    found = [path for place in ("csrc", "hydra_ext") for path in (ROOT / place).rglob("*") if path.is_dir()]
    return {
        path.relative_to(ROOT).as_posix(): len(units(path))
        for path in [ROOT / "hydra_ext", *found]
        if path.name != "__pycache__"
    }


def test_folders_have_a_few_units_each() -> None:
    sizes = folders()
    assert not {name: size for name, size in sizes.items() if size > MOST}
    assert {name for name, size in sizes.items() if 0 < size < FEWEST} == set(SMALL)


def test_packages_say_what_lives_there() -> None:
    silent = [
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / "hydra_ext").rglob("__init__.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent
