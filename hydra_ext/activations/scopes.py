"""Scopes of a stash around the calls of modules."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.calls import StandIn
from hydra_ext.tracing import not_traced

NO_PART = -1
_keys = itertools.count(1)  # keys of scopes; 0 is the scope of a whole stash


class ScopedModule(StandIn):
    """Stands in for a module's call, and opens a scope of the stash around it.

    Args:
        core: The stash.
        module: Any module.
        part: The scope's part.
        treatment: The scope's treatment.

    Attributes:
        treatment: Of calls that begin from now on. None continues that of the scope around it.
    """

    def __init__(
        self, core: _C.Stash, module: nn.Module, *, part: int = NO_PART, treatment: _C.Treatment | None = None
    ) -> None:
        super().__init__(module)
        self._core = core
        self._key = next(_keys)
        self._part = part
        self.treatment = treatment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # tensors saved by a compiled graph belong to the scope around the graph
            return self.inner(*args, **kwargs)
        return self._visit(args, kwargs)

    @not_traced
    def _visit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._core.begin_scope(self._key, treatment=self.treatment, part=self._part)
        try:
            return self.inner(*args, **kwargs)
        finally:
            self._core.end_scope(self._key)
