"""The modes of a microbatch's forward: its backward may run a part of the forward again in a later step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

Flags = tuple[bool, ...]


class Modes:
    """The ``training`` flags of modules and their submodules."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._last: Flags = ()

    def now(self) -> Flags:
        """The present flags: the same object for as long as they do not change."""
        flags = tuple(module.training for module in self._modules)
        if flags != self._last:
            self._last = flags
        return self._last

    @contextmanager
    def as_at(self, then: Flags) -> Iterator[None]:
        """Sets earlier flags for the body; restores the present ones afterwards."""
        before = self.now()
        if then is before or then == before:
            yield
            return
        self._set(then)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, flags: Flags) -> None:
        for module, flag in zip(self._modules, flags, strict=True):
            if module.training != flag:
                module.training = flag
