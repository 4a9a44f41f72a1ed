"""Finds tensors and plain values that modules or arguments hold, in containers and objects at any depth."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.split.rehearsal.record import PLAIN
from hydra_ext.state.contents import (
    ATTRIBUTES,
    MAPPING,
    OF_EVERY_MODULE,
    SEQUENCE,
    attributes_of,
    data_of,
    has_attributes,
    kinds_of,
)
from hydra_ext.state.foreign import is_foreign

# Attributes that every module has; all others are the model's state.
_OF_EVERY_MODULE = OF_EVERY_MODULE | {"forward"}
_WRITTEN_IN_PYTHON = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE
_LONGEST, _MOST = 4096, 20_000  # most members of one container, most holders in all: anything larger is data, not state


@dataclass(frozen=True)
class Root:
    """The beginning of a search: an attribute of a module or of a class, or an argument."""

    name: str
    module: nn.Module | type | None
    attribute: str
    value: Any


@dataclass(frozen=True)
class Entry:
    """A value that the search has reached.

    Attributes:
        path: Path from the root, as in Python code.
        root: Number of the root.
        holder: Container or object that holds the value; for an attribute of a module, the module.
        key: Key, index or attribute of the value in its holder.
        owner: Path of the nearest object on the way to the value whose class can be changed; None if there is none.
        attribute: Attribute of the owner, or else of the root, through which the value is reached.
        value: Value itself.
    """

    path: str
    root: int
    holder: Any
    key: Hashable
    owner: str | None
    attribute: str
    value: Any


def all_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the model, and others that they hold in plain containers or objects, by their paths."""
    found = dict(model.named_modules())
    known = {id(module) for module in found.values()}
    rest = found
    while rest:
        more: dict[str, nn.Module] = {}
        for entry in entries(module_roots(rest)):
            if isinstance(entry.value, nn.Module):
                for name, module in entry.value.named_modules(prefix=entry.path):
                    if id(module) not in known:
                        known.add(id(module))
                        more[name] = module
        found |= more
        rest = more
    return found


def class_roots(classes: Iterable[type]) -> list[Root]:
    return [
        Root(f"{kind.__module__}.{kind.__qualname__}.{attribute}", kind, attribute, value)
        for kind in classes
        for attribute, value in data_of(kind).items()
    ]


def module_roots(modules: Mapping[str, nn.Module]) -> list[Root]:
    return [
        Root(f"{name}.{attribute}" if name else attribute, module, attribute, value)
        for name, module in modules.items()
        for attribute, value in module.__dict__.items()
        if attribute not in _OF_EVERY_MODULE
    ]


def argument_roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Root]:
    named = [*((f"argument {place}", value) for place, value in enumerate(args)), *kwargs.items()]
    return [Root(name, None, name, value) for name, value in named]


def entries(roots: Iterable[Root], also: dict[int, set[int]] | None = None) -> Iterator[Entry]:
    """All values that can be reached from the roots, breadth first.

    A module that is reached is an entry, but its attributes are entries only if they are roots.

    Args:
        also: Gets, for each root, the numbers of other roots that lead to the same container.
    """
    waiting: deque[Entry] = deque()
    seen: dict[int, int] = {}
    for number, root in enumerate(roots):
        entry = Entry(root.name, number, root.module, root.attribute, None, root.attribute, root.value)
        yield entry
        waiting.append(entry)
    while waiting and len(seen) < _MOST:
        outer = waiting.popleft()
        inside = None if isinstance(outer.value, (Tensor, *PLAIN)) else members(outer.value)
        if inside is None:
            continue
        first = seen.get(id(outer.value))
        if first is not None:
            if also is not None and first != outer.root and not has_own_class(outer.value):
                also.setdefault(first, set()).add(outer.root)
                also.setdefault(outer.root, set()).add(first)
            continue
        seen[id(outer.value)] = outer.root
        owned = has_own_class(outer.value)
        for key, label, member in inside:
            owner, attribute = (outer.path, str(key)) if owned else (outer.owner, outer.attribute)
            entry = Entry(outer.path + label, outer.root, outer.value, key, owner, attribute, member)
            yield entry
            waiting.append(entry)


def members(value: Any) -> list[tuple[Hashable, str, Any]] | None:
    """Key, key as in Python code, and value of each member of a container or object; None for any other value.

    A container of more than ``_LONGEST`` members counts as any other value.
    """
    found: list[tuple[Hashable, str, Any]] = []
    kinds = kinds_of(value)
    if MAPPING in kinds or SEQUENCE in kinds or isinstance(value, tuple):
        if len(value) > _LONGEST:
            return None
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found += [(key, f"[{key!r}]", member) for key, member in pairs]
    elif not is_object(value):
        return None
    if ATTRIBUTES in kinds:
        found += [(name, f".{name}", member) for name, member in attributes_of(value).items()]
    return found


def is_object(value: Any) -> bool:
    """Whether it is an object with attributes, and not a module, tensor, function or class."""
    if isinstance(value, (type, nn.Module, Tensor, FunctionType, MethodType, ModuleType, torch.Generator)):
        return False
    return not is_foreign(type(value)) and has_attributes(type(value))


def has_own_class(value: Any) -> bool:
    """Whether it is an object of a class written in Python, and not a container."""
    is_container = isinstance(value, (dict, list, tuple, deque))
    return not is_container and is_object(value) and bool(type(value).__flags__ & _WRITTEN_IN_PYTHON)
