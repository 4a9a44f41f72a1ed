"""Operations of torch as a dispatch mode sees them, and the names of calls as a function mode sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hydra_ext.state.arguments import tensors_in

# These operations read only a tensor's shape.
_SHAPE_ONLY = {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")} | {
    f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")
}
# Ways in which Python learns a tensor's elements: functions in which a dispatch mode sees no operation that reads them,
# and operations.
VALUE_READS = {"tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}
VALUE_COPIES = {"tensor", "as_tensor", "asarray", "scalar_tensor"}  # torch.tensor([t]) reads t
VALUE_OPERATIONS = {"_local_scalar_dense", "equal", "is_nonzero"}
# Attributes of a tensor that are tensors.
_TENSOR_ATTRIBUTES = {"T", "mT", "H", "mH", "data", "real", "imag", "grad"}
# Attributes that describe a tensor's graph, which a stand-in lacks.
_OF_GRAPH = {"requires_grad", "is_leaf", "grad_fn"}
GRAPH_NODE = "__get__ grad_fn"
# Calls whose effect is on the tensor's whole gradient.
GRADIENT_HOOKS = {"register_hook", "retain_grad"}
_STATISTICS = ("running_mean", "running_var")  # written by operations whose schema does not say so


@dataclass(frozen=True)
class Operation:
    """
    Attributes:
        tensors: All tensors among its arguments.
        reads: Arguments whose elements it reads.
        writes: Arguments that it changes in place.
        is_fresh: Whether it returns memory that has just been filled, as in ``torch.tensor()``.
        random: Whether it draws random numbers.
        shape_depends_on_values: Whether the shape of its result depends on elements.
    """

    name: str
    tensors: list[Tensor]
    reads: list[Tensor]
    writes: list[Tensor]
    is_fresh: bool
    random: bool
    shape_depends_on_values: bool

    @staticmethod
    def of(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        name = function._schema.name.partition("::")[2]
        tensors = [*tensors_in((args, kwargs))]
        writes: list[Tensor] = []
        for i, argument in enumerate(function._schema.arguments):
            is_statistic = "batch_norm" in name and "backward" not in name and argument.name in _STATISTICS
            if is_statistic or (argument.alias_info is not None and argument.alias_info.is_write):
                writes += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
        tags = function.tags
        return Operation(
            name=name,
            tensors=tensors,
            reads=[] if name in _SHAPE_ONLY else tensors,
            writes=writes,
            is_fresh=name == "lift_fresh",
            random=torch.Tag.nondeterministic_seeded in tags,
            shape_depends_on_values=torch.Tag.dynamic_output_shape in tags
            and (name != "index" or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])),
        )


def call_name(function: Callable[..., Any]) -> str | None:
    """The name of a glue call; None for a call that gets no number, such as reading a shape or a device."""
    name = getattr(function, "__name__", None) or str(function)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        is_numbered = attribute in _TENSOR_ATTRIBUTES or (name == "__get__" and attribute in _OF_GRAPH)
        return f"{name} {attribute}" if is_numbered else None
    return name


_frames: weakref.WeakKeyDictionary[Callable[..., Any], int] = weakref.WeakKeyDictionary()
_frames_seen = 0


def checkpoint_frame() -> int | None:
    """The number of the non-reentrant checkpoint that the program is inside; None outside of any."""
    global _frames_seen
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return None
    if hooks[0] not in _frames:
        _frames_seen += 1
        _frames[hooks[0]] = _frames_seen
    return _frames[hooks[0]]
