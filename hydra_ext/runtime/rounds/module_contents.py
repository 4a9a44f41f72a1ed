"""What modules hold beside parameters and the values of buffers, as it was before a round that has to be undone.

That is their attributes, and what is in lists, dictionaries and sets among them, however deep; the names of their
buffers; and their hooks: libraries install some in the first forward, and note in an attribute that they have. Objects
of other classes are not looked into.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_OWN = frozenset({"_parameters", "_buffers", "_modules"})  # watched, or noted, by others
_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_LOOKED_INTO = _DICTS | {list, deque, set, Tensor}
_SMALL = 2**20  # bytes
_ABSENT: Any = object()


@dataclass(frozen=True)
class _NotedTensor:
    tensor: Tensor
    version: int
    value: Tensor | None  # None: too large to be copied each time, and trusted to its version


@dataclass
class ModuleContents:
    """The attributes of all modules of some models, as they are when this is made."""

    _names: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _containers: list[tuple[Any, Any]] = field(default_factory=list)
    _tensors: list[_NotedTensor] = field(default_factory=list)

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> ModuleContents:
        contents = cls()
        known: set[int] = set()
        for module in (module for model in models for module in model.modules()):
            names = module.__dict__
            before = {name: value for name, value in names.items() if name not in _OWN}
            contents._names.append((names, before))
            contents._containers.append((module._buffers, dict(module._buffers)))
            for value in before.values():
                contents._note(value, known)
        return contents

    def _note(self, value: Any, known: set[int]) -> None:
        kind = type(value)
        if kind not in _LOOKED_INTO or id(value) in known:
            return
        known.add(id(value))
        if kind is Tensor:
            if not value.requires_grad and value.layout is torch.strided and not value.is_inference():
                copy = value.detach().to("cpu", copy=True) if value.nbytes <= _SMALL else None
                self._tensors.append(_NotedTensor(value, value._version, copy))
            return
        self._containers.append((value, dict(value) if kind in _DICTS else kind(value)))
        for inner in value.values() if kind in _DICTS else value:
            if type(inner) in _LOOKED_INTO:
                self._note(inner, known)

    def obstacle(self) -> str:
        """What was changed and cannot be put back; empty if all can."""
        for noted in self._tensors:
            if noted.value is None and noted.tensor._version != noted.version:
                size = list(noted.tensor.shape)
                return f"a tensor of {size}, an attribute of a module, was written to; register it as a buffer"
        return ""

    @torch.no_grad()
    def restore(self) -> None:
        for names, before in self._names:
            for name in [name for name in names if name not in before and name not in _OWN]:
                del names[name]
            for name, value in before.items():
                if names.get(name, _ABSENT) is not value:
                    names[name] = value
        for container, before in self._containers:
            _refill(container, before)
        for noted in self._tensors:
            if noted.value is not None:
                noted.tensor.copy_(noted.value)


def _refill(container: Any, before: Any) -> None:
    items, wanted = (list(part.items()) if isinstance(part, dict) else list(part) for part in (container, before))
    if len(items) == len(wanted) and all(_same(a, b) for a, b in zip(items, wanted, strict=True)):
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
