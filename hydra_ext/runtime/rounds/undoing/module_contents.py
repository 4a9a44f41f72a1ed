"""State of modules beside parameters and the values of buffers, so that a round can be undone.

Covered are attributes and all objects reachable from them at any depth. These are containers, tensors, arrays, objects
of the user's classes, data of these classes, unregistered modules, iterators, and generators of random numbers. The
names of buffers are covered as well, and hooks: libraries install some in the first forward, and note in an attribute
that they have.

Objects that only closures hold are not covered. Containers of more than 4096 members are treated as data: they are
restored, but objects inside their members are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from hydra_ext.runtime import engine
from hydra_ext.runtime.rounds.undoing.accesses import Key
from hydra_ext.runtime.rounds.undoing.buffers import LatestCopies, NotedTensor
from hydra_ext.state.contents import (
    ARRAY,
    ATTRIBUTES,
    CONTAINERS,
    FIXED,
    ITERATOR,
    LEAVES,
    MAPPING,
    OF_EVERY_MODULE,
    SEQUENCE,
    SET,
    SOURCE,
    Kind,
    classes_of,
    has_changed,
    kinds_of,
    mapped_tuple,
)
from hydra_ext.state.iterators import independent_copy
from hydra_ext.state.memory import storage_key
from hydra_ext.state.numbers import is_small

_OWN = frozenset({"_parameters", "_buffers", "_modules"})  # covered elsewhere
_SIZED = (MAPPING, SEQUENCE, SET, FIXED)
_LONGEST = 4096
_LARGE = 2**20  # bytes of an array
_ABSENT: Any = object()


class Copies:
    """Copies of tensors and arrays; those of large ones are renewed only if the original has changed."""

    def __init__(self) -> None:
        self._tensors = LatestCopies()
        self._latest: dict[int, tuple[Any, Any]] = {}
        self._found: dict[int, tuple[Any, Any]] = {}
        self._parameters: set[int] | None = None
        self._models: Sequence[nn.Module] = ()

    def begin(self, models: Sequence[nn.Module]) -> None:
        """Begins a pass over the models. Copies that it does not request are dropped in the next one."""
        self._tensors.begin()
        self._latest, self._found = self._found, {}
        self._models, self._parameters = models, None

    def of_tensor(self, tensor: Tensor) -> NotedTensor:
        """A note of a tensor; without numbers for a large view of parameters, to which no round writes."""
        if not is_small(tensor) and self._is_of_parameters(tensor):
            return NotedTensor.without_numbers(tensor)
        return self._tensors.note(tensor)

    def of_array(self, array: np.ndarray[Any, Any]) -> Any:
        known = self._latest.get(id(array))
        if known is None or known[0] is not array or has_changed(ARRAY, array, known[1]):
            known = array, ARRAY.save(array)
        self._found[id(array)] = known
        return known[1]

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        if self._parameters is None:
            self._parameters = {storage_key(parameter) for model in self._models for parameter in model.parameters()}
        return storage_key(tensor) in self._parameters


@dataclass(frozen=True)
class _Noted:
    owner: nn.Module
    kind: Kind
    value: Any
    saved: Any


@dataclass
class ModuleContents:
    """The state of all modules of some models at one time."""

    _copies: Copies | None = None
    _apart: set[int] = field(default_factory=set)  # identities of modules that are not entered from others
    # With the module's empty dictionaries of hooks, of which no copies are made.
    _names: list[tuple[nn.Module, dict[str, Any], list[Any]]] = field(default_factory=list)
    _hooks: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)
    _empty: list[tuple[nn.Module, Any]] = field(default_factory=list)
    _noted: list[_Noted] = field(default_factory=list)
    _tensors: list[tuple[nn.Module, NotedTensor]] = field(default_factory=list)
    _iterators: list[tuple[_Noted, Any]] = field(default_factory=list)  # with an independent copy, if there can be one

    @classmethod
    def of(cls, models: Sequence[nn.Module], copies: Copies) -> ModuleContents:
        """Notes the present state of these models.

        Args:
            models: Models to note.
            copies: Copies from earlier notes of these models, which are reused.
        """
        copies.begin(models)
        modules = dict.fromkeys(module for model in models for module in model.modules())
        contents = cls(copies, {*map(id, modules)})
        known: set[int] = set()
        for module in modules:
            before = {name: value for name, value in module.__dict__.items() if name not in _OWN}
            no_hooks: list[Any] = []
            contents._names.append((module, before, no_hooks))
            contents._note_buffer_names(module, module._buffers)
            contents._note(module, contents._without_hooks(module, before, no_hooks), known)
            contents._note(module, classes_of(type(module)), known)
        return contents

    @classmethod
    def of_keys(cls, keys: Collection[Key]) -> ModuleContents:
        """Notes these attributes only, without the modules inside, to detect writes. Cannot be restored."""
        contents = cls(None, {id(inner) for module, _ in keys for inner in module.modules()})
        known: set[int] = set()
        for module, name in keys:
            contents._note(module, [module.__dict__.get(name), *classes_of(type(module))], known)
        return contents

    def _note_buffer_names(self, module: nn.Module, buffers: Any) -> None:
        if buffers:
            self._noted.append(_Noted(module, MAPPING, buffers, dict(buffers)))
        else:
            self._empty.append((module, buffers))

    def _without_hooks(self, owner: nn.Module, names: dict[str, Any], no_hooks: list[Any]) -> list[Any]:
        """The values of attributes that may hold state; dictionaries of hooks are replaced by the single hooks."""
        found: list[Any] = []
        for name, value in names.items():
            kind = type(value)
            if kind in LEAVES:
                continue
            if name in OF_EVERY_MODULE and kind in CONTAINERS:
                if value:
                    self._hooks.append((owner, value, value.copy()))
                    found += value.values() if isinstance(value, dict) else ()
                else:
                    no_hooks.append(value)
            else:
                found.append(value)
        return found

    def _note(self, owner: nn.Module, values: Iterable[Any], known: set[int]) -> None:
        rest = list(values)
        while rest:
            value = rest.pop()
            kind = type(value)
            if kind in LEAVES:
                continue
            if kind in CONTAINERS and not value:
                self._empty.append((owner, value))
            elif id(value) not in known:
                known.add(id(value))
                if isinstance(value, Tensor):
                    self._note_tensor(owner, value)
                elif id(value) not in self._apart:
                    rest += self._note_content(owner, value)

    def _note_tensor(self, owner: nn.Module, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or not tensor.is_leaf or engine.holds(tensor):
            return
        if self._copies is not None:
            noted = self._copies.of_tensor(tensor)
        else:
            noted = NotedTensor.of(tensor) if is_small(tensor) else NotedTensor.without_numbers(tensor)
        self._tensors.append((owner, noted))

    def _note_content(self, owner: nn.Module, value: Any) -> list[Any]:
        """Notes the content of an object. Returns its members."""
        found: list[Any] = []
        for kind in kinds_of(value):
            large = kind is ARRAY and value.nbytes > _LARGE and self._copies is not None
            saved = self._copies.of_array(value) if large and self._copies is not None else kind.save(value)
            noted = _Noted(owner, kind, value, saved)
            self._noted.append(noted)
            if kind is ITERATOR:
                self._iterators.append((noted, independent_copy(value)))
            if kind is ATTRIBUTES:
                found += classes_of(type(value))
            if kind not in _SIZED or len(saved) <= _LONGEST:
                found += kind.members(saved)
        return found

    @property
    def generators(self) -> list[Any]:
        """The noted generators of random numbers."""
        return [noted.value for noted in self._noted if noted.kind is SOURCE]

    @property
    def can_be_restored(self) -> bool:
        """Whether the state can be restored whatever becomes of the objects."""
        return all(copy is not None for _, copy in self._iterators)

    def again(self) -> ModuleContents:
        """Notes the present state of the same objects. Cannot be restored."""
        contents, known = ModuleContents(None, self._apart), set[int]()
        for owner, container in self._empty:
            contents._note(owner, [container], known)
        for noted in self._noted:
            if noted.value is not noted.owner._buffers:
                contents._note(noted.owner, [noted.value], known)
        for owner, tensor in self._tensors:
            contents._note(owner, [tensor.tensor], known)
        return contents

    def written(self) -> list[tuple[nn.Module, Any]]:
        """The objects that were written to in place since, each with a module that holds it.

        Tensors, arrays, containers, objects and classes count; hooks and generators of random numbers do not. An
        attribute that was set to another object does not count either.
        """
        found = [(owner, container) for owner, container in self._empty if container]
        for noted in self._noted:
            if noted.value is noted.owner._buffers and noted.value.keys() == noted.saved.keys():
                continue  # the values of buffers are compared elsewhere
            if noted.kind is SOURCE or (noted.kind is ATTRIBUTES and _is_named_once(noted)):
                continue
            if has_changed(noted.kind, noted.value, noted.saved):
                found.append((noted.owner, noted.value))
        return found + [(owner, noted.tensor) for owner, noted in self._tensors if noted.is_written()]

    def obstacle(self) -> str:
        """Why the state cannot be restored; empty if it can."""
        for noted, copy in self._iterators:
            if copy is None and has_changed(ITERATOR, noted.value, noted.saved):
                return f"a {type(noted.value).__name__}, which a module holds, has advanced; count in a number instead"
        return ""

    def restore(self) -> None:
        """Restores the noted state. An iterator that has advanced is replaced by a copy at its former position."""
        moved = {
            id(noted.value): independent_copy(copy)
            for noted, copy in self._iterators
            if copy is not None and has_changed(ITERATOR, noted.value, noted.saved)
        }

        def as_then(value: Any) -> Any:
            return mapped_tuple(value, as_then) if isinstance(value, tuple) else moved.get(id(value), value)

        for module, before, no_hooks in self._names:
            names = module.__dict__
            for name in [name for name in names if name not in before and name not in _OWN]:
                del names[name]
            for name, value in before.items():
                then = as_then(value) if moved else value
                if names.get(name, _ABSENT) is not then:
                    names[name] = then
            for hooks in no_hooks:
                if hooks:
                    hooks.clear()
        for _, hooks, saved in self._hooks:
            for kind in kinds_of(hooks):
                kind.put(hooks, kind.save(saved))
        for _, container in self._empty:
            if container:
                container.clear()
        for noted in self._noted:
            saved = noted.kind.mapped(noted.saved, as_then) if moved else noted.saved
            noted.kind.put(noted.value, saved)
        for _, tensor in self._tensors:
            tensor.restore()


def without(contents: ModuleContents, modules: Collection[nn.Module]) -> ModuleContents:
    """The contents without what these modules hold. An object that several hold is the first one's."""
    if not modules:
        return contents
    return ModuleContents(
        contents._copies,
        contents._apart,
        [each for each in contents._names if each[0] not in modules],
        [each for each in contents._hooks if each[0] not in modules],
        [each for each in contents._empty if each[0] not in modules],
        [each for each in contents._noted if each.owner not in modules],
        [each for each in contents._tensors if each[0] not in modules],
        [each for each in contents._iterators if each[0].owner not in modules],
    )


def _is_named_once(noted: _Noted) -> bool:
    """Whether the only changes of attributes are from None to a string.

    The first forward of some models stores the kind of loss so, in an object that all modules hold. Every microbatch
    stores the same.
    """
    now = noted.kind.save(noted.value)
    if now.keys() != noted.saved.keys():
        return False
    return all(now[name] is was or (was is None and type(now[name]) is str) for name, was in noted.saved.items())
