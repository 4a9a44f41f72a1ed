"""A model on other tensors for a while, which stand in for its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hydra_ext.state.arguments import closed, opened


class Replacements(ABC):
    """Makes tensors that stand in for others: one for each, however often it is asked for."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # originals too: a dead one's identity may be used again

    @abstractmethod
    def make(self, tensor: Tensor) -> Tensor:
        """Makes the one that stands in for a tensor."""

    def of(self, tensor: Tensor) -> Tensor:
        known = self._made.get(id(tensor))
        if known is None:
            known = self._made[id(tensor)] = tensor, self.make(tensor)
        return known[1]

    def of_value(self, value: Any) -> Any:
        """A value with a replacement of each tensor in it."""

        def of_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.of(leaf)
            content = opened(leaf)
            return (
                leaf if content is None else closed(leaf, {key: self.of_value(held) for key, held in content.items()})
            )

        return tree_map(of_leaf, value)


@contextmanager
def replaced(model: nn.Module, replacements: Replacements) -> Iterator[None]:
    """Replacements stand in for all tensors that modules hold. Afterwards they hold what they held before."""
    before = [_held(module) for module in model.modules()]
    try:
        for module in model.modules():
            _replace(module, replacements)
        yield
    finally:
        for attributes, contents in before:
            attributes.put()
            for content in contents:
                content.put()


class _Content:
    """What a dictionary or list held at one moment."""

    def __init__(self, owner: dict[Any, Any] | list[Any]) -> None:
        self._owner = owner
        self._held = owner.copy()

    def put(self) -> None:
        if isinstance(self._owner, dict):
            if list(self._owner) == list(self._held):
                self._owner.update(self._held)
                return
            self._owner.clear()
            self._owner.update(self._held)
        else:
            self._owner[:] = self._held


def _held(module: nn.Module) -> tuple[_Content, list[_Content]]:
    return _Content(module.__dict__), [
        _Content(value) for value in module.__dict__.values() if isinstance(value, (dict, list))
    ]


def _replace(module: nn.Module, replacements: Replacements) -> None:
    holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
    for held in holders:
        for name, value in held.items():
            if isinstance(value, Tensor):
                held[name] = replacements.of(value)
