"""The user's own generators. Runs that do not count (rehearsals, timing) draw from them, too, and restore them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hydra_ext.state.randomness import is_default


def generator_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator among the call's arguments. Torch's defaults do not count: they are seeded for each event."""
    for value in (kwargs.get("generator"), *args):
        if isinstance(value, torch.Generator) and not is_default(value):
            return value
    return None


class DrawnGenerators:
    """The generators that calls have drawn from, with their states before the first draw."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._users: dict[int, set[int]] = {}

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], user: int = -1) -> None:
        """Notes the generator of a call before the call is made.

        Args:
            user: Number of the event in which, or after which, the call is made; -1 before the first event.
        """
        generator = generator_given(args, kwargs)
        if generator is not None:
            if id(generator) not in self._before:
                self._before[id(generator)] = generator, generator.get_state()
            self._users.setdefault(id(generator), set()).add(user)

    def put_back(self) -> None:
        """Sets each generator to its state before the first draw."""
        for generator, state in self._before.values():
            generator.set_state(state)

    def release(self) -> list[tuple[frozenset[int], weakref.ReferenceType[torch.Generator]]]:
        """Drops all generators. Returns the users of each, and a reference that is dead if nothing else holds it."""
        found = [(frozenset(self._users[n]), weakref.ref(generator)) for n, (generator, _) in self._before.items()]
        self._before.clear()
        self._users.clear()
        return found


class DrawWatch(TorchFunctionMode):
    """Notes the generators that calls inside draw from."""

    def __init__(self, drawn: DrawnGenerators) -> None:
        super().__init__()
        self._drawn = drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._drawn.note(args, kwargs or {})
        return func(*args, **(kwargs or {}))
