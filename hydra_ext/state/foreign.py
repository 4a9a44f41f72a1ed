"""Classes of the standard library, torch, numpy and hydra_ext, whose objects hold no state of a model."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import TypeVar

_Answer = TypeVar("_Answer")


def for_each_class(ask: Callable[[type], _Answer]) -> Callable[[type], _Answer]:
    """Caches the answers of a function of a class."""
    return lru_cache(maxsize=4096)(ask)


# Modules whose objects (SimpleNamespace, UserDict, Namespace) hold their user's data.
_PLAIN_HOLDERS = {"types", "collections", "argparse"}
_BELOW = {"torch", "numpy", "hydra_ext"}
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = Path(__file__).parents[1]  # in an editable install it is not among the installed packages


@for_each_class
def is_foreign(kind: type) -> bool:
    """Whether objects of the class are machinery of the standard library, torch, numpy or hydra_ext.

    Examples are queues, locks, loggers and handles.
    """
    package = str(kind.__module__).partition(".")[0]  # some classes set __module__ to another object than a name
    return package in _BELOW or (package not in _PLAIN_HOLDERS and is_of_library(kind))


@for_each_class
def is_of_library(kind: type) -> bool:
    """Whether the class is in the standard library. A user's package may have the name of one of its modules."""
    package = str(kind.__module__).partition(".")[0]  # some classes set __module__ to another object than a name
    if package not in sys.stdlib_module_names:
        return False
    module = sys.modules.get(kind.__module__)
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return file is None or _is_in_library(Path(file))  # a built-in module has no file


def is_installed(function: FunctionType) -> bool:
    """Whether the function's code is in a library, and not the user's own."""
    file = Path(function.__code__.co_filename)
    return bool(_INSTALLED.intersection(file.parts)) or file.is_relative_to(_OURS) or _is_in_library(file)


def _is_in_library(file: Path) -> bool:
    return any(
        file.is_relative_to(library) and not _INSTALLED.intersection(file.relative_to(library).parts)
        for library in _libraries()
    )


@lru_cache(maxsize=1)
def _libraries() -> tuple[Path, ...]:
    return Path(os.__file__).parent, Path(sysconfig.get_path("platstdlib"))
