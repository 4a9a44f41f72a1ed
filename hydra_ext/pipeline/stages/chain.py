"""Explicit stages: each one is a module that gets the result of the stage before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_ext.errors import StateError, UnsupportedModel
from hydra_ext.outputs import split
from hydra_ext.split.stage_program import Crossing, StagePass, event_seed, reseed
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import LastingMemory

_CONSTANTS = (type(None), bool, int, float, str)
_ONE_TENSOR = json.dumps([pytree.treespec_dumps(pytree.tree_structure(0)), [["tensor"]]])  # what a tensor alone makes


class Arrival(torch.autograd.Function):
    """Makes tensors from the stage before results of an operation, so that the model may write to them.

    Its backward stores their gradients in the box.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, box: ArrivalBox) -> tuple[Tensor, ...]:
        ctx.box = box
        ctx.set_materialize_grads(False)
        outputs = box.tensors
        ctx.mark_non_differentiable(*(t for t, wanted in zip(outputs, box.requires_grad, strict=True) if not wanted))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.box.gradients = gradients
        return None, None


class ArrivalBox:
    """The tensors that arrived for one microbatch, until they enter the graph; then their gradients."""

    def __init__(self, arriving: Crossing) -> None:
        self.tensors = arriving.tensors
        self.requires_grad = arriving.requires_grad
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(arriving.tensors)

    def enter(self) -> list[Tensor]:
        """Returns the tensors as parts of the graph, and drops its own references."""
        if not any(self.requires_grad) or not torch.is_grad_enabled():
            tensors = list(self.tensors)
        else:
            tensors = list(Arrival.apply(torch.zeros((), device="cpu", requires_grad=True), self))  # type: ignore[no-untyped-call]
        self.tensors = ()
        return tensors


class ChainStage:
    """A :class:`~hydra_ext.split.stage_program.StageProgram` that calls one module.

    The first stage's module gets the microbatch; each other one gets the result of the stage before. A result consists
    of tensors, numbers, texts and None in any nesting of tuples, lists and dictionaries. The last stage's result goes
    to ``fn(value, microbatch)``, which returns the loss.
    """

    def __init__(self, module: nn.Module, *, index: int, last: bool) -> None:
        self._module = module
        self._index = index
        self._last = last

    def forward(
        self, fn: Callable[..., Any], microbatch: Any, arriving: Crossing | None, *, seed: int, divisor: int
    ) -> StagePass:
        box = None if arriving is None else ArrivalBox(arriving)
        value = microbatch if box is None or arriving is None else assemble(box.enter(), arriving.structure)
        reseed(event_seed(seed, self._index))
        value = self._module(value)
        reseed(event_seed(seed, self._index, after=True))
        if not self._last:
            lasting = LastingMemory(self._module, *((microbatch, *tensors_in(microbatch)) if box is None else ()))
            return ChainPass.handing_on(box, value, lasting, f"stage {self._index}")
        return ChainPass.ending(box, fn(value, microbatch), divisor)


class ChainPass:
    """The :class:`~hydra_ext.split.stage_program.StagePass` of an explicit stage."""

    def __init__(
        self,
        box: ArrivalBox | None,
        roots: list[Tensor],
        *,
        leaving: Crossing | None = None,
        loss: Tensor | None = None,
        metrics: Any = None,
    ) -> None:
        self._box = box
        self._roots: list[Tensor] | None = roots
        self.leaving = leaving
        self.loss = loss
        self.metrics = metrics

    @classmethod
    def handing_on(cls, box: ArrivalBox | None, value: Any, lasting: LastingMemory, owner: str) -> ChainPass:
        """The pass of a stage before the last, whose module has returned ``value``."""
        tensors, structure = take_apart(value, owner)
        own = tuple(lasting.own(tensor) for tensor in tensors)
        return cls(box, tensors, leaving=Crossing(own, tuple(t.requires_grad for t in tensors), structure))

    @classmethod
    def ending(cls, box: ArrivalBox | None, output: Any, divisor: int) -> ChainPass:
        """The pass of the last stage, after ``fn`` has returned ``output``."""
        loss, metrics = split(output)
        metrics = pytree.tree_map_only(Tensor, Tensor.detach, metrics)
        return cls(box, [loss_root(loss, divisor)], loss=loss.detach(), metrics=metrics)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        roots, self._roots = self._roots, None
        if roots is None:
            raise StateError("the backward of this microbatch has run")
        if self.loss is not None:
            torch.autograd.backward(roots)
        else:
            pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs])
        return () if self._box is None else self._box.gradients


def loss_root(loss: Tensor, divisor: int) -> Tensor:
    """The tensor from which the backward of the last stage starts.

    Raises:
        ValueError: The loss is no scalar, or has no graph.
    """
    if not torch.is_grad_enabled():
        return loss
    if not loss.requires_grad or loss.numel() != 1:
        raise ValueError(
            f"fn returned a loss of shape {tuple(loss.shape)}"
            + ("" if loss.requires_grad else " that depends on no trainable parameter")
            + ": return a scalar to run backward from"
        )
    return loss / divisor if divisor != 1 else loss


def take_apart(value: Any, owner: str) -> tuple[list[Tensor], str]:
    """Returns the tensors of a value, and the text from which :func:`assemble` makes it again.

    Args:
        owner: What returned the value, for errors.

    Raises:
        UnsupportedModel: A part of the value cannot go to another rank.
    """
    if isinstance(value, Tensor):
        return [value], _ONE_TENSOR
    leaves, spec = pytree.tree_flatten(value)
    constants = [["tensor"] if isinstance(leaf, Tensor) else _constant(leaf, owner) for leaf in leaves]
    try:
        text = pytree.treespec_dumps(spec)
        reason = "" if pytree.treespec_loads(text) == spec else "a key of a dictionary would arrive as another one"
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = str(error)
    if reason:
        raise UnsupportedModel(
            f"{owner}: something in it cannot be put together on another rank ({reason}): return tensors in tuples, "
            "lists and dictionaries, whose keys are texts or numbers"
        )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], json.dumps([text, constants])


def assemble(tensors: list[Tensor], structure: str) -> Any:
    """Makes the value that :func:`take_apart` has taken apart."""
    constants, spec = _parsed(structure)
    rest = iter(tensors)
    leaves = [_leaf(constant, rest) for constant in constants]
    return pytree.tree_unflatten(leaves, spec)


@lru_cache(maxsize=64)
def _parsed(structure: str) -> tuple[list[Any], pytree.TreeSpec]:
    text, constants = json.loads(structure)
    return constants, pytree.treespec_loads(text)


def _constant(leaf: Any, owner: str) -> Any:
    """The value for JSON. A subclass of a JSON type is refused, since JSON would return the base type."""
    if type(leaf) in _CONSTANTS:
        return leaf
    if isinstance(leaf, np.float64):  # the type of numpy's means
        return ["float64", float(leaf)]
    raise UnsupportedModel(
        f"{owner}: a {type(leaf).__name__} cannot go to another rank: only tensors, None, bool, int, float and str "
        "can (none derived from them), in tuples, lists and dictionaries"
    )


def _leaf(constant: Any, tensors: Iterator[Tensor]) -> Any:
    if constant == ["tensor"]:
        return next(tensors)
    return np.float64(constant[1]) if isinstance(constant, list) else constant
