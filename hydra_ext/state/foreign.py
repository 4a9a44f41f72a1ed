"""Classes of the standard library and of the libraries below us: what their objects keep is no state of a model's."""

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
    """Asked once of each, as far as one remembers."""
    return lru_cache(maxsize=4096)(ask)


# Whose objects (SimpleNamespace, UserDict, Namespace) hold what their user puts in.
_PLAIN_HOLDERS = {"types", "collections", "argparse"}
_BELOW = {"torch", "numpy", "hydra_ext"}
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = Path(__file__).parents[1]  # is elsewhere in an editable install


@for_each_class
def is_foreign(kind: type) -> bool:
    """Machinery: queues, locks, loggers, handles."""
    package = str(kind.__module__).partition(".")[0]  # some classes set it to what is no name
    return package in _BELOW or (package not in _PLAIN_HOLDERS and is_of_library(kind))


@for_each_class
def is_of_library(kind: type) -> bool:
    """Whether the class is one of the standard library's; a package of the user's may be called like one of those."""
    package = str(kind.__module__).partition(".")[0]  # some classes set it to what is no name
    if package not in sys.stdlib_module_names:
        return False
    module = sys.modules.get(kind.__module__)
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return file is None or _is_in_library(Path(file))  # without a file it is built in


def is_installed(function: FunctionType) -> bool:
    """Whether it comes with a library, and is no code of the user's own."""
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
