"""Consecutive children of an ``nn.Sequential`` that run as one module, so that they can be recomputed as one.

A stand-in for the call of the ``nn.Sequential`` calls the groups and the other children in turn, with the operators of
its own forward. A group is a module that is not part of the model. So hooks of the children run as before, and the
names in the model stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _all_modules

from hydra_ext.calls import StandIn, calls_in_turn, same_modules
from hydra_ext.tracing import not_traced


class Group(nn.Module):
    """Calls modules one after the other, each with what the one before it returns."""

    def __init__(self, children: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules.update((str(number), child) for number, child in enumerate(children))

    def forward(self, given: Any) -> Any:
        for child in self.__dict__["_modules"].values():
            given = child(given)
        return given


@dataclass(frozen=True)
class Span:
    """Children of an ``nn.Sequential``, from the first up to and without the end."""

    sequential: nn.Module
    first: int
    end: int


class Groups:
    """The groups of one model, those of earlier choices included."""

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Module, ...], Group] = {}
        self._calls: dict[nn.Module, _CallInPieces] = {}

    def choose(self, spans: Collection[Span]) -> list[Group]:
        """From now on these children run as one, and no others do. Spans of one module do not overlap.

        Returns their groups.
        """
        of_each: dict[nn.Module, list[Span]] = {}
        for span in spans:
            of_each.setdefault(span.sequential, []).append(span)
        for sequential, call in self._calls.items():
            if sequential not in of_each:
                call.remove()
        chosen: list[Group] = []
        for sequential, own in of_each.items():
            children = [*sequential.__dict__["_modules"].values()]
            pieces = list(children)
            for span in sorted(own, key=lambda span: span.first, reverse=True):
                group = self._group(children[span.first : span.end])
                pieces[span.first : span.end] = [group]
                chosen.append(group)
            call = self._calls.setdefault(sequential, _CallInPieces(sequential))
            call.set_pieces(children, pieces)
            call.install(innermost=True)
        return chosen

    def made(self, span: Span) -> Group | None:
        """The group of these children; None if it was never chosen."""
        children = [*span.sequential.__dict__["_modules"].values()]
        return self._made.get(tuple(children[span.first : span.end]))

    def _group(self, children: Sequence[nn.Module]) -> Group:
        """The same group for the same children: what is known of it stays."""
        return self._made.setdefault(tuple(children), Group(children))


class _CallInPieces(StandIn):
    """Stands in for the call of an ``nn.Sequential``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._children: list[nn.Module] = []
        self._pieces: list[nn.Module] = []

    def set_pieces(self, children: list[nn.Module], pieces: list[nn.Module]) -> None:
        self._children = children
        self._pieces = pieces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs or len(args) != 1 or not self._is_as_before():
            return self.inner(*args, **kwargs)
        return self._in_pieces(args[0])

    @not_traced
    def _in_pieces(self, given: Any) -> Any:
        for piece in self._pieces:
            given = piece(given)
        return given

    def _is_as_before(self) -> bool:
        """Whether the call would do nothing but call the children that it had: no hooks, and no code of others."""
        return (
            self.replaced is None
            and not _has_hooks_on_all_modules()
            and not torch._C._get_tracing_state()
            and calls_in_turn(self.module)
            and same_modules(self._children, self.module.__dict__["_modules"].values())
        )


def _has_hooks_on_all_modules() -> bool:
    hooks = vars(_all_modules)
    return any(hooks[f"_global_{way}_{when}hooks"] for way in ("forward", "backward") for when in ("", "pre_"))
