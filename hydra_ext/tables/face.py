"""What modules show in the place of a table while a window is open: a tensor without bytes in which rows are looked up.

``nn.Embedding``, ``nn.EmbeddingBag`` and calls of the functions behind them reach the table through it. What else reads
the weight would need the whole table on the device, so it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hydra_ext.errors import UnsupportedModel
from hydra_ext.tables.lookup import TableRows
from hydra_ext.tracing import nothing_traced

# Properties and methods that need no bytes.
_PROPERTIES = {"device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse", "itemsize"}
_PROPERTIES |= {"layout", "nbytes", "ndim", "shape"}
_METHODS: set[Callable[..., Any]] = {
    Tensor.__hash__,
    Tensor.__len__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.is_inference,
    Tensor.ndimension,
    Tensor.nelement,
    Tensor.numel,
    Tensor.size,
    torch.is_complex,
    torch.is_floating_point,
    torch.is_inference,
    torch.numel,
}
_VERSION = Tensor._version.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class TableFace(Tensor):
    """Stands for a table's weight, with its shape, on the run's device."""

    _is_param = True  # makes it an nn.Parameter to isinstance
    moves_by_rows = True
    rows: TableRows

    @staticmethod
    def of(rows: TableRows) -> TableFace:
        host = rows.host
        face: TableFace = torch.Tensor._make_wrapper_subclass(
            TableFace, host.shape, dtype=rows.dtype, device=rows.device, requires_grad=host.requires_grad
        )
        face.rows = rows
        return face

    def __getattr__(self, name: str) -> Any:
        """Attributes that the user gave to the parameter."""
        return getattr(self.__dict__["rows"].host, name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the table {self.rows.name!r}, of which rows are on the device>"

    @classmethod
    @nothing_traced
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        face = _face_in((*args, *(kwargs or {}).values()))
        if func is functional.embedding:
            return face.rows.embedding(*_without(face, args), **(kwargs or {}))
        if func is functional.embedding_bag:
            return face.rows.embedding_bag(*_without(face, args), **(kwargs or {}))
        if func == _REQUIRES_GRAD:
            return face.rows.host.requires_grad
        if func == _VERSION:
            return face.rows.host._version
        if _needs_no_bytes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _reads_the_whole(face, getattr(func, "__name__", func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _reads_the_whole(_face_in((*args, *(kwargs or {}).values())), func)


def _needs_no_bytes(func: Callable[..., Any]) -> bool:
    owner = getattr(func, "__self__", None)  # of the getter of a property: its descriptor
    return func in _METHODS or (func.__name__ == "__get__" and getattr(owner, "__name__", None) in _PROPERTIES)


def _without(face: TableFace, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without the weight, which is the second one."""
    if len(args) < 2 or args[1] is not face:
        raise _reads_the_whole(face, "an embedding whose second argument is not the table")
    return (args[0], *args[2:])


def _face_in(values: Sequence[Any]) -> TableFace:
    """The first face among arguments, of which there is one."""
    inner = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return next(each for group in inner for each in group if isinstance(each, TableFace))


def _reads_the_whole(face: TableFace, what: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"the forward uses '{face.rows.name}' in {what}, but only rows of it are on the device, which its module looks "
        "up: name the table's module in blocks= of hydra_ext.offload, so that it moves whole"
    )
