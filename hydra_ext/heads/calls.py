"""Calls of linear layers whose output is not computed yet, where the plain one would not fit the budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.calls import StandIn, has_hooks, is_compiled
from hydra_ext.heads.bits import HeadShape, has_plain_bits
from hydra_ext.heads.terms import Logits, Tally
from hydra_ext.heads.unmade import Unmade, Unmaking
from hydra_ext.tracing import not_traced

_transforms = torch._C._functorch.peek_interpreter_stack
_TIMES = 8  # its inputs: outputs of a layer that may be a head, wherever it stands in the model


class Heads:
    """The linear layers of one model, of which some may be heads that do not fit.

    Args:
        model: The model.
        budget: Device bytes; None runs no head in rows.
        exact: Whether a head runs in rows only where that has the bits of the plain one on this machine.

    Attributes:
        is_wary: Whether a head for which the budget may be too small runs in rows, too, and not only one for which it
            is.
        is_in_doubt: Whether there was one that did not, for it was not wary.
        tally: What was computed.
        seen: Layers that ran so that they may be heads, by name.
        in_rows: Names of those whose logits were left unmade.
    """

    def __init__(self, model: nn.Module, budget: int | None, *, exact: bool) -> None:
        self._budget = budget
        self._exact = exact
        self.is_wary = False
        self.is_in_doubt = False
        self.tally = Tally()
        self.seen: dict[str, HeadShape] = {}
        self.in_rows: list[str] = []
        self._calls = [_HeadCall(self, name, module) for name, module in _may_be_heads(model)]

    def install(self) -> None:
        for call in self._calls:
            call.install(innermost=True)

    def remove(self) -> None:
        for call in reversed(self._calls):
            call.remove()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context for :meth:`install` and :meth:`remove`."""
        self.install()
        try:
            yield
        finally:
            self.remove()

    def be_wary(self) -> bool:
        """A step has run out of memory. Returns whether another one may fit now."""
        was_wary, self.is_wary = self.is_wary, True
        return self.is_in_doubt and not was_wary

    def find(self, name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Unmade | None:
        """The product of a layer, unmade if the plain one may not fit."""
        shape = HeadShape(
            rows=hidden.size(0),
            inputs=hidden.size(1),
            classes=weight.size(1),
            has_bias=bias is not None,
            dtype=hidden.dtype,
            device=hidden.device,
        )
        if not shape.rows:
            return None
        self.seen[name] = shape
        if self._budget is None or shape.ample_bytes <= self._budget:
            return None
        if shape.least_bytes <= self._budget and not self.is_wary:
            self.is_in_doubt = True
            return None
        if self._exact and not has_plain_bits(shape):
            return None
        if name not in self.in_rows:
            self.in_rows.append(name)
        return Unmade(Logits(hidden, weight, bias, shape.parts, self.tally))


def _may_be_heads(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers with many outputs; of the last one more than its inputs are many."""
    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, module in layers:
        many = _TIMES * module.in_features if module is not layers[-1][1] else module.in_features + 1
        if module.out_features >= many and "forward" not in module.__dict__:
            yield name, module


class _HeadCall(StandIn):
    def __init__(self, heads: Heads, name: str, module: nn.Linear) -> None:
        super().__init__(module)

        def find(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Unmade | None:
            is_plain = hidden.is_contiguous() and weight.t().is_contiguous()
            # Under autocast the weight is a copy, which may be gone when the loss is made.
            return heads.find(name, hidden, weight, bias) if is_plain and weight.dtype == module.weight.dtype else None

        self._find = find

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._only_computes():
            return self.inner(*args, **kwargs)
        return self._unmade(args, kwargs)

    @not_traced
    def _only_computes(self) -> bool:
        """Whether neither hooks, nor compiled code, nor torch.func would see what is not computed."""
        return not has_hooks(self.module) and not is_compiled(self.module) and _transforms() is None

    @not_traced
    def _unmade(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with Unmaking(self._find):
            return self.inner(*args, **kwargs)
