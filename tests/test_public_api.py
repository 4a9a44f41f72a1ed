"""The public names and signatures, as tests/public_api.txt lists them.

``python test_public_api.py > public_api.txt``, in tests/, writes the list anew: a name or an argument that goes, or
changes its meaning, breaks users' programs.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra_ext
import hydra_ext.codec
import hydra_ext.data
import hydra_ext.errors
import hydra_ext.fleet
import hydra_ext.optim
import hydra_ext.plan
import hydra_ext.schedule
import hydra_ext.tiled

LIST = Path(__file__).with_name("public_api.txt")
MODULES = (
    hydra_ext,
    hydra_ext.codec,
    hydra_ext.data,
    hydra_ext.errors,
    hydra_ext.fleet,
    hydra_ext.optim,
    hydra_ext.plan,
    hydra_ext.schedule,
    hydra_ext.tiled,
)


def names_of(module: ModuleType) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")])


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):  # what is made in C++ has none
        return ""


def members(name: str, kind: type) -> Iterator[str]:
    """What the package itself gives a class; what torch's optimizers have is torch's."""
    if issubclass(kind, enum.Enum):
        yield from (f"{name}.{member}" for member in kind.__members__)
        return
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "hydra_ext":
            found |= vars(base)
            found |= dict.fromkeys(vars(base).get("__annotations__", {}))
    for member, value in sorted(found.items()):
        if not member.startswith("_"):
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            yield f"{name}.{member}{signature(value) if callable(value) else ''}"


def api() -> Iterator[str]:
    for module in MODULES:
        for name in names_of(module):
            value = getattr(module, name)
            full = f"{module.__name__}.{name}"
            if isinstance(value, type):
                bases = [base.__name__ for base in value.__bases__ if base is not object]
                shown = "" if issubclass(value, enum.Enum) else signature(value)
                yield f"{full}{shown}" + (f" of {', '.join(bases)}" if module is hydra_ext.errors else "")
                yield from members(full, value)
            else:
                yield f"{full}{signature(value) if callable(value) else ''}"


def test_the_public_names_and_signatures_are_those_of_the_list() -> None:
    assert list(api()) == LIST.read_text().splitlines()


if __name__ == "__main__":
    print(*api(), sep="\n")
