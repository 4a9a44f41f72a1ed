"""Stand-ins for tensors of other stages, and tensors that arrive from another stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hydra_ext.state.memory import storage_key


def poison(dtype: torch.dtype) -> float | int | bool:
    """A number that cannot be taken for a result: NaN, True, or the lowest integer."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


class StandIns:
    """Tensors of any shape that hold nothing: all their elements share one element of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elements: dict[torch.dtype, Tensor] = {}
        self._memory: set[int] = set()

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        element = self._elements.get(dtype)
        if element is None:
            with torch.inference_mode(False):
                element = torch.full((), poison(dtype), dtype=dtype, device=self._device)
            self._elements[dtype] = element
            self._memory.add(storage_key(element))
        return element.expand(tuple(shape))

    def holds(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._memory


def whole_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of; the tensor itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


class Absent(nn.Parameter):
    """A stand-in for a parameter of another stage: it has the shape and a device, but one element of memory.

    Attributes:
        trainable: Whether the parameter requires a gradient on the stage that holds it.
    """

    trainable: bool

    @staticmethod
    def like(parameter: Tensor, device: torch.device) -> Absent:
        element = torch.full((), poison(parameter.dtype), dtype=parameter.dtype, device=device)
        made: Absent = torch.Tensor._make_subclass(Absent, element.expand(parameter.shape), False)
        made.trainable = parameter.trainable if isinstance(parameter, Absent) else parameter.requires_grad
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        if id(self) not in memo:
            memo[id(self)] = Absent.like(self, self.device)
        made: Absent = memo[id(self)]
        return made


class AbsentBuffer(Tensor):
    """A stand-in for a buffer of another stage, with one element of memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment,unused-ignore]

    @staticmethod
    def like(buffer: Tensor, device: torch.device) -> AbsentBuffer:
        element = torch.full((), poison(buffer.dtype), dtype=buffer.dtype, device=device)
        made: AbsentBuffer = torch.Tensor._make_subclass(AbsentBuffer, element.expand(buffer.shape), False)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentBuffer:
        if id(self) not in memo:
            memo[id(self)] = AbsentBuffer.like(self, self.device)
        made: AbsentBuffer = memo[id(self)]
        return made


class Arrival:
    """Tensors from the stage before, entered into this stage's graph, which collects their gradients.

    They are neither leaves nor views. A program may write to them, and each gets one gradient: the sum over its uses.
    """

    def __init__(self, tensors: Sequence[Tensor], requires_grad: Sequence[bool]) -> None:
        self.gradients: list[Tensor | None] = [None] * len(tensors)
        self.tensors = [tensor.detach() for tensor in tensors]
        differentiable = [i for i, wanted in enumerate(requires_grad) if wanted and torch.is_grad_enabled()]
        if differentiable:
            start = torch.zeros((), device="cpu", requires_grad=True)
            entered = _Enter.apply(start, differentiable, [self.tensors[i] for i in differentiable], self.gradients)  # type: ignore[no-untyped-call]
            for i, tensor in zip(differentiable, entered, strict=True):
                self.tensors[i] = tensor


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, start: Tensor, positions: list[int], tensors: list[Tensor], gradients: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        # The tensors are not kept here: they hold the graph, which holds this object.
        ctx.positions, ctx.gradients = positions, gradients
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        for position, gradient in zip(ctx.positions, gradients, strict=True):
            ctx.gradients[position] = gradient
        return None, None, None, None


def out_of_graph(output: Any, arguments: Sequence[Tensor]) -> Any:
    """The output of a call, its tensors entered into a new graph, so that the graph of the call can be freed.

    Tensors that lie in the memory of the arguments stay as they are.
    """
    leaves, tree = tree_flatten(output)
    given = {storage_key(argument) for argument in arguments}
    cut: dict[int, Tensor] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None and storage_key(leaf) not in given:
            if id(leaf) not in cut:
                cut[id(leaf)] = Arrival([leaf], [True]).tensors[0]
            leaves[i] = cut[id(leaf)]
    return tree_unflatten(leaves, tree) if cut else output
