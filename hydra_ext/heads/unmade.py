"""Tensors that are not computed yet, and the operators that compute them in parts.

Autograd sees tensors and operators as always, so the graph is plain PyTorch's. Below it, the operators between a linear
layer and a cross entropy, forward and backward, make terms of terms, or compute in parts. Every other operator gets the
whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hydra_ext.heads.terms import Cast, LogSoftmax, OneOfEach, SoftmaxGradient, Term

_aten: Any = torch.ops.aten
_SHARING = {  # give access to memory, without an operator
    Tensor.numpy,
    Tensor.__array__,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.__dlpack__,
    Tensor.share_memory_,
}
_RAW = _SHARING | {  # read memory without an operator
    Tensor.tolist,
    Tensor.__reduce_ex__,
    Tensor.__deepcopy__,
    Tensor.__repr__,
}
_LOSS_DTYPES = (torch.float32, torch.float64)
_IGNORED = -1  # a row without a loss, in targets among one class


class Unmade(Tensor):
    """A tensor that is not computed yet.

    Attributes:
        term: The matrix.
        flipped: Whether this is its transpose.
    """

    term: Term
    flipped: bool

    @staticmethod
    def __new__(cls, term: Term, shape: Sequence[int] | None = None, *, flipped: bool = False) -> Unmade:
        made: Unmade = Tensor._make_wrapper_subclass(
            cls, term.size if shape is None else tuple(shape), dtype=term.dtype, device=term.device
        )
        made.term = term
        made.flipped = flipped
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RAW:
            if func in _SHARING:
                args[0].term.share()
            return func(args[0].made(), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        found = NotImplemented if handler is None else handler(*args, **kwargs)
        return _on_whole(func, args, kwargs) if found is NotImplemented else found

    def made(self) -> Tensor:
        """The numbers, without a graph."""
        whole = self.term.whole().detach()
        return whole.t() if self.flipped else whole.view(self.shape)


Find = Callable[[Tensor, Tensor, Tensor | None], Unmade | None]
"""From rows of hidden states, a transposed weight and a bias: their product, unmade; None for a plain one."""


class Unmaking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which the product of a linear layer may stay unmade."""

    def __init__(self, find: Find) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._find = find

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = None
        if not kwargs and func is _aten.mm.default:
            found = self._find(args[0], args[1], None)
        elif not kwargs and func is _aten.addmm.default and args[0].dim() == 1:
            found = self._find(args[1], args[2], args[0])
        return func(*args, **(kwargs or {})) if found is None else found


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on whole tensors. What it writes to, it returns as it was given."""
    givers: dict[int, Unmade] = {}
    writes = func._schema.is_mutable
    shares = not writes and any(value.alias_info is not None for value in func._schema.returns)

    def made(value: Any) -> Any:
        if not isinstance(value, Unmade):
            return value
        if writes:
            value.term.before_write()
        elif shares:
            value.term.share()
        whole = value.made()
        givers[id(whole)] = value
        return whole

    args, kwargs = tree_map(made, (args, kwargs))
    out = func(*args, **kwargs)
    return tree_map(lambda value: givers.get(id(value), value), out)


# ---- operators; NotImplemented leaves them to plain PyTorch ---------------------------------------------------------


def _view(source: Unmade, shape: Sequence[int]) -> Any:
    columns = source.term.size[1]
    if source.flipped or not shape or shape[-1] not in (columns, -1):
        return NotImplemented
    outer, rows = list(shape[:-1]), source.term.size[0]
    if -1 in outer:
        others = -math.prod(outer)
        outer[outer.index(-1)] = rows // others if others > 0 else rows
    return Unmade(source.term, (*outer, columns)) if math.prod(outer) == rows else NotImplemented


def _alias(source: Unmade) -> Any:
    return Unmade(source.term, source.shape, flipped=source.flipped)


def _t(source: Unmade) -> Any:
    if source.dim() != 2:
        return NotImplemented
    rows, columns = source.shape
    return Unmade(source.term, (columns, rows), flipped=not source.flipped)


def _to_copy(source: Unmade, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    same = {"device": source.device, "layout": torch.strided}
    if any(value and value != same.get(name) for name, value in options.items()):
        return NotImplemented
    if dtype is None or not dtype.is_floating_point or source.flipped or source.term.is_shared:
        return NotImplemented
    if dtype == source.dtype:  # a copy, which may be written to
        return NotImplemented
    return Unmade(Cast(source.term, dtype), source.shape)


def _log_softmax(source: Unmade, dim: int, half_to_float: bool) -> Any:
    is_plain = source.dim() == 2 and dim in (1, -1) and not half_to_float and not source.flipped
    may_stay = source.dtype in _LOSS_DTYPES and not source.term.is_shared
    return Unmade(LogSoftmax(source.term)) if is_plain and may_stay else NotImplemented


def _nll_loss(source: Any, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Any:
    term = source.term if isinstance(source, Unmade) and not source.flipped else None
    if not isinstance(term, LogSoftmax) or weight is not None or target.dim() != 1:
        return NotImplemented
    only, classes = _only_class(target, ignored)
    return _aten.nll_loss_forward(term.of_classes(classes), only, None, reduction, _IGNORED)


def _nll_loss_backward(
    gradient: Tensor,
    source: Any,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
) -> Any:
    term = source.term if isinstance(source, Unmade) and not source.flipped else None
    if not isinstance(term, LogSoftmax) or weight is not None or target.dim() != 1:
        return NotImplemented
    only, classes = _only_class(target, ignored)
    alone = torch.zeros(term.size[0], 1, dtype=term.dtype, device=term.device)
    numbers = _aten.nll_loss_backward(gradient, alone, only, None, reduction, _IGNORED, total_weight)
    return Unmade(OneOfEach(numbers, classes, term.size[1], term.parts))


def _only_class(target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Targets among one class, or ignored; and the places of the targets, in one column."""
    is_ignored = target == ignored  # which may be 0, as the one class is
    return torch.where(is_ignored, _IGNORED, 0), torch.where(is_ignored, 0, target).unsqueeze(1)


def _log_softmax_backward(gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    terms = [each.term if isinstance(each, Unmade) and not each.flipped else None for each in (gradient, output)]
    one, logs = terms
    if not isinstance(one, OneOfEach) or not isinstance(logs, LogSoftmax) or dtype != logs.dtype:
        return NotImplemented
    if one.is_shared or logs.is_shared:
        return NotImplemented
    return Unmade(SoftmaxGradient(one, logs))


def _mm(left: Any, right: Any) -> Any:
    if not isinstance(left, Unmade) or isinstance(right, Unmade) or not left.term.is_of_backward:
        return NotImplemented
    term, count = left.term, left.size(0)
    made = right.new_empty(count, right.size(1))
    for at in term.column_parts() if left.flipped else term.row_parts():
        part = term.columns(at).contiguous().t() if left.flipped else term.rows(at)
        torch.mm(part, right, out=made[at])
    return made


def _sum(source: Unmade, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """A bias's gradient."""
    if source.dim() != 2 or source.flipped or dims != [0] or dtype is not None or not source.term.is_of_backward:
        return NotImplemented
    made = torch.empty(source.term.size[1], dtype=source.dtype, device=source.device)
    for at in source.term.column_parts():
        made[at] = source.term.columns(at).contiguous().sum(0)
    return made.unsqueeze(0) if keepdim else made


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.t.default: _t,
    _aten._to_copy.default: _to_copy,
    _aten._log_softmax.default: _log_softmax,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.mm.default: _mm,
    _aten.sum.dim_IntList: _sum,
}
