"""Notes a microbatch's reads of module attributes by descriptors on the classes, while the forward of a round runs.

Reads of buffers, and of attributes that hold tensors or containers, are noted. Of other attributes only those that
forwards set are noted, or all until a first forward has shown which these are. Reads by compiled code, and reads
through a module's ``__dict__``, are not detected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.runtime.rounds import fibers
from hydra_ext.state.contents import OF_EVERY_MODULE, kinds_of

Key = tuple[nn.Module, str]
Place = tuple[type, str]

ABSENT: Any = object()
_NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes, type(None))


class Accesses:
    """The attributes and buffers whose reads are noted in the rounds of one run."""

    def __init__(self) -> None:
        self._set: set[Place] = set()
        self._known: set[int] = set()  # modules
        self._all: set[Place] = set()
        self._of_state: set[Place] = set()
        self._learned = False

    def learn(self, keys: Iterable[Key]) -> bool:
        """Learns that forwards set these. Returns whether reads of some of them were not noted until now."""
        places = {(type(module), name) for module, name in keys if name and name not in OF_EVERY_MODULE}
        unnoted = not places <= self._places
        self._set |= places
        self._learned = True
        return unnoted

    @property
    def _places(self) -> set[Place]:
        return self._set | self._of_state if self._learned else self._all

    @contextmanager
    def noted(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """A context in which reads in fibers are reported to the fiber's listener."""
        self._look_through(models)
        installed: list[Place] = []
        try:
            for place in self._places:
                if _install(place):
                    installed.append(place)
            yield
        finally:
            for place in reversed(installed):
                _remove(place)

    def _look_through(self, models: Iterable[nn.Module]) -> None:
        for module in (module for model in models for module in model.modules()):
            if id(module) in self._known:
                continue
            self._known.add(id(module))
            kind = type(module)
            self._of_state.update((kind, name) for name in module._buffers)
            for name, value in module.__dict__.items():
                if name in OF_EVERY_MODULE or isinstance(value, nn.Parameter):
                    continue
                if isinstance(value, Tensor) or kinds_of(value):
                    self._of_state.add((kind, name))
                elif isinstance(value, _NUMBERS_AND_TEXTS):
                    self._all.add((kind, name))
        self._all |= self._of_state


class _Noted:
    """A descriptor that notes reads of an attribute and returns the module's value.

    Args:
        name: Name of the attribute.
        inherited: The class's own attribute of that name, for modules without a value.
    """

    def __init__(self, name: str, inherited: Any) -> None:
        self._name = name
        self._inherited = inherited

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        name = self._name
        if module is not None:
            if not torch.compiler.is_compiling():
                fiber = fibers.current()
                if fiber is not None:
                    fiber.attributes.note_read(fiber.index, module, name)
            names = module.__dict__
            if name in names:
                return names[name]
            if name in module._buffers:
                return module._buffers[name]
        if self._inherited is not ABSENT:
            found = self._inherited
            return found.__get__(module, kind) if hasattr(type(found), "__get__") else found
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        if self._name not in module.__dict__:
            raise AttributeError(self._name)
        del module.__dict__[self._name]


@dataclass
class _Installed:
    descriptor: _Noted
    own: Any  # the class's own attribute of that name, or ABSENT
    users: int = 1


_lock = threading.Lock()
_installed: dict[Place, _Installed] = {}


def _install(place: Place) -> bool:
    kind, name = place
    if issubclass(kind, torch.jit.ScriptModule):
        return False
    with _lock:
        if place in _installed:
            _installed[place].users += 1
            return True
        found = next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), ABSENT)
        if isinstance(found, _Noted):  # installed on a base class
            found = found._inherited
        elif hasattr(type(found), "__set__") or hasattr(type(found), "__delete__"):
            return False  # a property, which takes precedence over the module's own value
        installed = _Installed(_Noted(name, found), kind.__dict__.get(name, ABSENT))
        setattr(kind, name, installed.descriptor)
        _installed[place] = installed
        return True


def _remove(place: Place) -> None:
    kind, name = place
    with _lock:
        installed = _installed[place]
        installed.users -= 1
        if installed.users:
            return
        del _installed[place]
        if kind.__dict__.get(name) is not installed.descriptor:
            return  # replaced meanwhile
        if installed.own is ABSENT:
            delattr(kind, name)
        else:
            setattr(kind, name, installed.own)
