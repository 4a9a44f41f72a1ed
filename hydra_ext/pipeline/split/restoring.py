"""A model's modules as they were: attributes, and what is in the containers and objects they hold."""

from __future__ import annotations

import operator
import sys
from argparse import Namespace
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
_SIMPLE = {dict, OrderedDict, list, set, deque}
_OPENED = (SimpleNamespace, Namespace, UserDict, UserList)
# Whose objects are machinery (locks, loggers, handles) and not what a forward keeps.
_MACHINERY = {*sys.stdlib_module_names, "torch", "numpy", "hydra_ext"} - {"__main__"}


@contextmanager
def unchanged_modules(model: nn.Module) -> Iterator[None]:
    """Puts back afterwards what is set, replaced, added or removed in any module, and in whatever it holds."""
    before = ModulesBefore(model)
    try:
        yield
    finally:
        before.restore()


class ModulesBefore:
    """As they are now. What tensors hold is not looked at.

    Every microbatch of a first stage pays for it, so that nothing is done for the many empty containers of a module but
    to remember them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._empty: list[Any] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._others: list[Callable[[], None]] = []
        rest: list[Any] = [model]
        while rest:
            value = rest.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for held in self._note(value):
                    if type(held) in _SIMPLE and not held:
                        self._empty.append(held)
                    elif type(held) not in _PLAIN:
                        rest.append(held)

    def restore(self) -> None:
        for empty in self._empty:
            if empty:
                empty.clear()
        for held, content in self._dicts:
            _set_dict(held, content)
        for undo in self._others:
            undo()

    def _note(self, value: Any) -> Iterable[Any]:
        """What it holds in turn; all of that stays alive here, so that an identity means one object."""
        kind = type(value)
        if kind in _SIMPLE or issubclass(kind, (dict, list, set, deque)):
            return self._note_container(value)
        if issubclass(kind, nn.Module):
            return self._note_dict(value.__dict__)
        if issubclass(kind, Tensor):
            return ()
        if issubclass(kind, tuple):
            return tuple(value)
        if issubclass(kind, np.ndarray):
            saved = value.copy()
            self._others.append(lambda: np.copyto(value, saved))
        elif issubclass(kind, torch.Generator):
            state = value.get_state()
            self._others.append(lambda: value.set_state(state))
        elif issubclass(kind, _OPENED) or _is_users(kind):
            return self._note_dict(value.__dict__)
        return ()

    def _note_container(self, value: Any) -> Iterable[Any]:
        if not value:
            self._empty.append(value)
            return ()
        if isinstance(value, dict):
            return self._note_dict(value)
        if isinstance(value, set):
            members = set(value)
            self._others.append(lambda: _set_set(value, members))
            return ()
        content = list(value)
        self._others.append(lambda: _set_list(value, content))
        return content

    def _note_dict(self, held: dict[Any, Any]) -> Iterable[Any]:
        content = dict(held)
        self._dicts.append((held, content))
        return content.values()


def _is_users(kind: type) -> bool:
    """An object of the user's that keeps its state in attributes."""
    return not issubclass(kind, type) and kind.__module__.partition(".")[0] not in _MACHINERY and _has_dict(kind)


def _has_dict(kind: type) -> bool:
    return getattr(kind, "__dictoffset__", 0) != 0


def _set_dict(held: dict[Any, Any], content: dict[Any, Any]) -> None:
    """By the built-in classes' own methods: a class of the user's may do more in its own."""
    is_same = len(held) == len(content) and all(map(operator.is_, held.values(), content.values()))
    if is_same and all(map(operator.is_, held, content)):
        return
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    kind.clear(held)
    for key, value in content.items():
        kind.__setitem__(held, key, value)


def _set_list(held: Any, content: list[Any]) -> None:
    if len(held) == len(content) and all(map(operator.is_, held, content)):
        return
    kind: Any = list if isinstance(held, list) else deque
    kind.clear(held)
    kind.extend(held, content)


def _set_set(held: set[Any], content: set[Any]) -> None:
    if held != content:
        set.clear(held)
        set.update(held, content)
