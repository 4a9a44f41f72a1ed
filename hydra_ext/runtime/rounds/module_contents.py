"""What modules hold beside parameters and the values of buffers, as it was before a round that has to be undone.

That is their attributes, and what is in lists, tuples, dictionaries and sets among them, however deep; the states of
generators of random numbers there; the names of their buffers; and their hooks: libraries install some in the first
forward, and note in an attribute that they have. Objects of other classes are not looked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hydra_ext.activations.module_state import is_small
from hydra_ext.runtime.rounds.accesses import CONTAINERS, DICTS, TORCHS, Key
from hydra_ext.state import numbers
from hydra_ext.state.randomness import OwnRandomness, is_generator

_OWN = frozenset({"_parameters", "_buffers", "_modules"})  # watched, or noted, by others
_ABSENT: Any = object()


@dataclass(frozen=True)
class _NotedTensor:
    owner: nn.Module
    tensor: Tensor
    version: int
    value: Tensor | None  # None: too large to be copied each time, or sparse, and trusted to its version


@dataclass
class ModuleContents:
    """The attributes of all modules of some models, as they are when this is made.

    Attributes:
        generators: of random numbers, that the modules hold.
    """

    _names: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _containers: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)
    _tensors: list[_NotedTensor] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    _hooks: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)
    _randomness: OwnRandomness = field(default_factory=lambda: OwnRandomness(()))

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> ModuleContents:
        return cls.of_each(module for model in models for module in model.modules())

    @classmethod
    def of_each(cls, modules: Iterable[nn.Module]) -> ModuleContents:
        """Of these modules themselves, those inside left out."""
        contents = cls()
        known: set[int] = set()
        for module in modules:
            names = module.__dict__
            before = {name: value for name, value in names.items() if name not in _OWN}
            contents._names.append((names, before))
            contents._containers.append((module, module._buffers, dict(module._buffers)))
            for name, value in before.items():
                if name in TORCHS:
                    contents._note_hooks(module, value)
                else:
                    contents._note(module, value, known)
        contents._randomness = OwnRandomness(contents.generators)
        return contents

    @classmethod
    def of_keys(cls, keys: Iterable[Key]) -> ModuleContents:
        """Of these attributes."""
        contents, known = cls(), set[int]()
        for module, name in keys:
            contents._note(module, module.__dict__.get(name), known)
        return contents

    def _note_hooks(self, owner: nn.Module, value: Any) -> None:
        kind = type(value)
        if kind in CONTAINERS:
            self._hooks.append((owner, value, dict(value) if kind in DICTS else kind(value)))

    def _note(self, owner: nn.Module, value: Any, known: set[int]) -> None:
        kind = type(value)
        if kind in CONTAINERS:
            if id(value) not in known:
                known.add(id(value))
                self._containers.append((owner, value, dict(value) if kind in DICTS else kind(value)))
                for inner in value.values() if kind in DICTS else value:
                    self._note(owner, inner, known)
        elif kind is Tensor:
            if id(value) not in known and value.is_leaf and not value.is_inference():
                known.add(id(value))
                copy = numbers.on_host(value) if is_small(value) else None
                self._tensors.append(_NotedTensor(owner, value, value._version, copy))
        elif issubclass(kind, tuple):
            for inner in value:
                self._note(owner, inner, known)
        elif is_generator(value) and id(value) not in known:
            known.add(id(value))
            self.generators.append(value)

    def written(self) -> list[tuple[nn.Module, Any]]:
        """Tensors and containers that have been written to since, each with a module that holds it; what was set in
        their place does not count, nor do hooks."""
        found: list[tuple[nn.Module, Any]] = []
        for owner, container, before in self._containers:
            if container is owner._buffers and container.keys() == before.keys():
                continue  # others see what is in them
            if not _is_as_before(container, before):
                found.append((owner, container))
        for noted in self._tensors:
            moved = noted.tensor._version != noted.version
            if moved or (noted.value is not None and numbers.differ(noted.tensor, noted.value)):
                found.append((noted.owner, noted.tensor))
        return found

    def again(self) -> ModuleContents:
        """What these tensors and containers have in them now. Cannot be restored."""
        contents, known = ModuleContents(), set[int]()
        for owner, value in [(part[0], part[1]) for part in self._containers]:
            if value is not owner._buffers:
                contents._note(owner, value, known)
        for noted in self._tensors:
            contents._note(noted.owner, noted.tensor, known)
        return contents

    def obstacle(self) -> str:
        """What was changed and cannot be put back; empty if all can."""
        for noted in self._tensors:
            if noted.value is None and noted.tensor._version != noted.version:
                size = list(noted.tensor.shape)
                return f"a tensor of {size}, an attribute of a module, was written to; register it as a buffer"
        return ""

    def restore(self) -> None:
        for names, before in self._names:
            for name in [name for name in names if name not in before and name not in _OWN]:
                del names[name]
            for name, value in before.items():
                if names.get(name, _ABSENT) is not value:
                    names[name] = value
        for _, container, before in [*self._containers, *self._hooks]:
            _refill(container, before)
        for noted in self._tensors:
            if noted.value is not None:
                numbers.put(noted.tensor, noted.value)
        self._randomness.restore()


def _is_as_before(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    items, wanted = (list(part.items()) if isinstance(part, dict) else list(part) for part in (container, before))
    return all(_same(a, b) for a, b in zip(items, wanted, strict=True))


def _refill(container: Any, before: Any) -> None:
    if _is_as_before(container, before):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b
