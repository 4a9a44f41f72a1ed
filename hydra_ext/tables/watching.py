"""Tensors on the host of which rows may be behind: whatever reads them first brings all rows up to date.

Whatever reads a gradient by rows finds a dense one.

The tensor stays the user's own object. Its class is another one meanwhile, whose operations settle it first. Tensors
that share its memory would read it without that; :func:`is_alone` says whether there are any.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.optim import rows

Settle = Callable[[], None]

_settling: dict[int, tuple[weakref.ref[Tensor], Settle]] = {}  # by the identity of a watched tensor

# Properties and methods that neither read nor write numbers.
_PROPERTIES = {"device", "dtype", "grad", "grad_fn", "is_leaf", "is_sparse", "itemsize", "layout", "nbytes", "ndim"}
_PROPERTIES |= {"requires_grad", "shape", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_cpu"}
_PROPERTIES |= {"is_cuda", "is_meta", "is_quantized"}
_METHODS: set[Callable[..., Any]] = {
    Tensor.__hash__,
    Tensor.__len__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_inference,
    Tensor.ndimension,
    Tensor.nelement,
    Tensor.numel,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.stride,
    torch.is_complex,
    torch.is_floating_point,
    torch.is_inference,
    torch.numel,
}
_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_REPLACED = Tensor.data.__set__  # type: ignore[attr-defined]


class _Watched(Tensor):
    """What a watched tensor is meanwhile."""

    stands_for: type[Tensor] = Tensor  # in checkpoints

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (_GRADIENT, _REPLACED):  # a gradient that is left over has the form of the numbers from before
            rows.make_dense(args[0])
        if not needs_no_bytes(func):
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                if id(tensor) in _settling:
                    _settling[id(tensor)][1]()
        if func is torch.autograd.grad:  # a backward: modules that it calls again use tensors of other classes
            with ExitStack() as plain:
                for tensor in filter(lambda each: id(each) in _settling, _tensors((*args, *(kwargs or {}).values()))):
                    rows.make_dense(tensor)
                    plain.enter_context(_as_outside(tensor))
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _settling[id(self)][1]()
        with _as_outside(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _settling[id(self)][1]()
        with _as_outside(self):
            return self.__reduce_ex__(protocol)


class _WatchedParameter(_Watched, nn.Parameter):
    """The same of a parameter."""

    stands_for = nn.Parameter


def watch(tensor: Tensor, settle: Settle) -> None:
    """Calls ``settle`` before each operation on the tensor that reads or writes numbers, until :func:`unwatch`."""
    key = id(tensor)
    _settling[key] = weakref.ref(tensor, lambda _: _settling.pop(key, None)), settle
    object.__setattr__(tensor, "__class__", _watched(tensor))


def unwatch(tensor: Tensor) -> None:
    _settling.pop(id(tensor), None)
    if isinstance(tensor, _Watched):
        object.__setattr__(tensor, "__class__", _plain(tensor))


def can_be_watched(tensor: Tensor) -> bool:
    """Whether the tensor is of one of torch's own classes, and its memory belongs to torch and to this process."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous() and tensor.device.type == "cpu"
    shared = tensor.is_shared()  # type: ignore[no-untyped-call]
    return plain and not shared and tensor.untyped_storage().resizable()


def is_alone(tensor: Tensor) -> bool:
    """Whether nothing else, such as another tensor, an array, a storage or a process, can read the tensor's memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return _C.is_alone(tensor)


def needs_no_bytes(func: Callable[..., Any]) -> bool:
    owner = getattr(func, "__self__", None)  # of what reads or writes a property: its descriptor
    return func in _METHODS or (
        getattr(owner, "__name__", None) in _PROPERTIES and func.__name__ in ("__get__", "__set__", "__delete__")
    )


@contextmanager
def _as_outside(tensor: Tensor) -> Iterator[None]:
    """A context in which the tensor has the class that it has when it is not watched."""
    watched = _watched(tensor)
    object.__setattr__(tensor, "__class__", _plain(tensor))
    try:
        yield
    finally:
        if id(tensor) in _settling:
            object.__setattr__(tensor, "__class__", watched)


def _watched(tensor: Tensor) -> type[Tensor]:
    return _WatchedParameter if isinstance(tensor, nn.Parameter) else _Watched


def _plain(tensor: Tensor) -> type[Tensor]:
    return nn.Parameter if isinstance(tensor, _WatchedParameter) else Tensor


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
