"""Tries options with an optimizer's class: whether it accepts them, and which state a step with them keeps.

A trial uses a parameter of at most four numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hydra_ext.errors import HydraError
from hydra_ext.optim import SGD, masters
from hydra_ext.optim.delayed import DelayedOptimizer
from hydra_ext.optim.host_optimizer import HostOptimizer

_HOW = {"capturable", "differentiable", "foreach", "fused"}  # options for the way a step runs, not for its state
_SOME = 0.5  # valid as a rate, a momentum and a decay of every optimizer
_AWAKE = ("momentum", "correction")  # options that at zero disable state, which earlier steps may have made
_LATER: tuple[tuple[type, frozenset[str]], ...] = (  # state that a step makes if it is missing
    (torch.optim.SGD, frozenset({"momentum_buffer"})),
    (SGD, frozenset({"momentum_buffer", "step"})),
    (HostOptimizer, frozenset({masters.LOWER, masters.FULL})),
    (DelayedOptimizer, frozenset({"previous_update"})),
)


@dataclass(frozen=True)
class Kept:
    """The state that a step keeps of a parameter.

    Attributes:
        needed: Names of the state that a step requires.
        known: Sample values by name, for the state that a step keeps, and that it would keep with other options.
    """

    needed: frozenset[str]
    known: Mapping[str, Any]


class Trials:
    """Trials with the class of one optimizer. Each trial runs once, as groups often have the same options."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._refusals: dict[str, str] = {}
        self._kept: dict[tuple[str, torch.dtype, int], Kept | None] = {}
        self.later = frozenset[str]().union(*(names for cls, names in _LATER if isinstance(optimizer, cls)))

    def refusal(self, options: Mapping[str, Any]) -> str:
        """The reason why a constructor refuses options; empty if it accepts them."""
        given = self._given(options)
        key = repr(given)
        if key not in self._refusals:
            self._refusals[key] = self._tried(given)
        return self._refusals[key]

    def kept(self, options: Mapping[str, Any], dtype: torch.dtype, dimensions: int) -> Kept | None:
        """The state that a step keeps of a parameter of this type; None if no such step can be made."""
        given = {name: value for name, value in self._given(options).items() if name not in _HOW}
        key = repr(given), dtype, dimensions
        if key not in self._kept:
            state = self._stepped(given, dtype, dimensions)
            asleep = {name: _SOME for name in _AWAKE if given.get(name) == 0}
            more = self._stepped(given | asleep, dtype, dimensions) if asleep else None
            self._kept[key] = (
                None if state is None else Kept(frozenset(state) - self.later, state if more is None else more | state)
            )
        return self._kept[key]

    def _given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for a constructor.

        The rate is replaced: steps accept rates that no constructor does, and its value does not matter here.
        """
        taken = inspect.signature(type(self._optimizer)).parameters
        anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        given = {
            name: tree_map_only(Tensor, _numbers, value)
            for name, value in sorted(options.items())
            if name in self._optimizer.defaults and (name in taken or anything)
        }
        return given | ({"lr": _SOME} if isinstance(given.get("lr"), (int, float)) else {})

    def _tried(self, given: dict[str, Any]) -> str:
        try:
            self._made(given, torch.float32, 2)
        except (HydraError, ValueError, TypeError, RuntimeError) as error:
            return str(error) or type(error).__name__
        return ""

    def _made(self, given: dict[str, Any], dtype: torch.dtype, dimensions: int) -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(shape(dimensions), dtype=dtype, device="cpu"))
        return type(self._optimizer)([parameter], **given)

    def _stepped(self, given: dict[str, Any], dtype: torch.dtype, dimensions: int) -> dict[str, Any] | None:
        try:
            made = self._made(given, dtype, dimensions)
            parameter = made.param_groups[0]["params"][0]
            parameter.grad = torch.ones_like(parameter)
            type(made).step.__wrapped__(made)  # type: ignore[attr-defined]  # without the hooks of all optimizers
        except Exception:  # noqa: BLE001 - such as a step that needs a closure: no comparison is possible then
            return None
        return dict(made.state[parameter])


def shape(dimensions: int) -> tuple[int, ...]:
    """A shape of few numbers that differs from the shapes of state by row or by column."""
    return (1,) * (dimensions - 2) + (2,) * min(dimensions, 2)


def _numbers(value: Tensor) -> Tensor:
    """A tensor with numbers, in place of one on meta."""
    return torch.full(value.shape, _SOME, dtype=value.dtype, device="cpu")
