"""Composites: frozen parameters that consist of several tensors, such as quantised weights.

A composite's *inner tensors* are packed numbers, scales and tables of codes. They are paged as plain parameters are, so
the packed bytes move. The device parameter is a composite of the same class around the inner tensors on the device.

Two kinds of classes have inner tensors: tensor subclasses that torch can take apart (``__tensor_flatten__``), as
torchao's, and parameters of integers whose attributes lead to further tensors, as those of bitsandbytes. There the
parameter itself is an inner tensor. Other classes of parameters are plain ones, whose attributes both faces share.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class Composite:
    """A composite of a model.

    Attributes:
        name: Its name in the model.
        inner: Its inner tensors by their paths, such as ``"scale"``; the path of the parameter itself is empty.
        attributes: Its attributes, when this was made.
    """

    name: str
    parameter: nn.Parameter
    inner: Mapping[str, Tensor]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def has_changed(self) -> bool:
        """Whether the parameter has other inner tensors, or other values of its attributes, than noted here."""
        held = self.parameter.__dict__
        if any(name not in held or held[name] is not value for name, value in self.attributes.items()):
            return True
        now = {} if self.parameter.requires_grad else inner_tensors(self.parameter)
        return bool(now) and [*map(id, now.values())] != [*map(id, self.inner.values())]

    def around(self, others: Mapping[int, Tensor]) -> Tensor:
        """A parameter like this one around other inner tensors.

        Args:
            others: Those tensors, by the identity of the ones whose places they take. The parameter's own, if it is an
                inner tensor, becomes the result.
        """
        host: Any = self.parameter
        if is_traceable_wrapper_subclass(host):
            made = nn.Parameter(_assembled(host, others), requires_grad=False)
            for name, value in host.__dict__.items():
                made.__dict__.setdefault(name, value)
            return made
        face = others[id(host)]
        # Bypasses a __setattr__ of the class's own.
        object.__setattr__(face, "__dict__", _exchanged(host.__dict__, _with_aliases(self.inner, host, others)))
        object.__setattr__(face, "__class__", type(host))
        return face


def composites_of(model: nn.Module) -> list[Composite]:
    for module in model.modules():
        _rejoin(module)
    found = ((name, parameter, inner_tensors(parameter)) for name, parameter in model.named_parameters())
    return [
        Composite(name, parameter, inner, dict(parameter.__dict__))
        for name, parameter, inner in found
        if [*inner] != [""]
    ]


def inner_tensors(parameter: Tensor) -> dict[str, Tensor]:
    """The inner tensors of a composite by their paths, each once. Of other parameters it is the parameter itself."""
    if parameter.requires_grad or type(parameter) in (Tensor, nn.Parameter):
        return {"": parameter}
    given: Any = parameter
    if is_traceable_wrapper_subclass(given):
        return _each_once(_flattened(given, ""))
    if parameter.is_floating_point() or parameter.is_complex():
        return {"": parameter}
    found = _each_once(_reached(parameter.__dict__, "", set()))
    inner = {path: tensor for path, tensor in found.items() if not _is_alias(tensor, parameter)}
    return {"": parameter, **inner}


def forget_device(model: nn.Module) -> None:
    """At the end of a context: what :func:`_rejoin` has undone was done again, with tensors of the context."""
    for module in model.modules():
        weight, state = module._parameters.get("weight"), module.__dict__.get("state")
        # A weight that has none of its own was replaced inside: the state's are the only ones.
        if type(weight).__name__ == "Int8Params" and getattr(weight, "SCB", None) is not None and state is not None:
            state.CB = state.SCB = None


def _rejoin(module: Any) -> None:
    """Undoes the first forward of an 8-bit layer of bitsandbytes, which moves tensors from the weight to the module.

    The next forward moves them again.
    """
    weight, state = module._parameters.get("weight"), module.__dict__.get("state")
    if type(weight).__name__ == "Int8Params" and getattr(weight, "CB", None) is None and hasattr(state, "SCB"):
        weight.CB, weight.SCB = state.CB, state.SCB


def _each_once(found: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    by_identity: dict[int, tuple[str, Tensor]] = {}
    for path, tensor in found:
        by_identity.setdefault(id(tensor), (path, tensor))
    return dict(by_identity.values())


def _flattened(tensor: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if is_traceable_wrapper_subclass(inner):
            yield from _flattened(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _assembled(tensor: Any, others: Mapping[int, Tensor]) -> Tensor:
    names, context = tensor.__tensor_flatten__()
    inner: dict[str, Any] = {name: getattr(tensor, name) for name in names}
    made = {
        name: _assembled(value, others) if is_traceable_wrapper_subclass(value) else others[id(value)]
        for name, value in inner.items()
    }
    assembled: Tensor = type(tensor).__tensor_unflatten__(made, context, tensor.size(), tensor.stride())
    return assembled


def _reached(attributes: Mapping[str, Any], prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that attributes lead to, through objects, but not through modules."""
    for name, value in attributes.items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.requires_grad:
                yield f"{prefix}{name}", value
        elif _may_lead_on(value):
            yield from _reached(value.__dict__, f"{prefix}{name}.", seen)


def _may_lead_on(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, FunctionType))


def _exchanged(attributes: Mapping[str, Any], others: dict[int, Any]) -> dict[str, Any]:
    """The attributes with other tensors; objects that lead to some are copied. ``others`` gets the copies, too."""
    made = {}
    for name, value in attributes.items():
        if id(value) not in others and _may_lead_on(value) and any(_reached(value.__dict__, "", set())):
            others[id(value)] = copy.copy(value)
            others[id(value)].__dict__.update(_exchanged(value.__dict__, others))
        made[name] = others.get(id(value), value)
    return made


def _with_aliases(inner: Mapping[str, Tensor], host: Tensor, others: Mapping[int, Tensor]) -> dict[int, Any]:
    """``others``, and for attributes that have the parameter's own memory the memory of the one in its place."""
    found = {id(tensor): others[id(tensor)] for tensor in inner.values() if tensor is not host}
    own = others[id(host)].detach()
    return found | {id(tensor): own for _, tensor in _reached(host.__dict__, "", set()) if _is_alias(tensor, host)}


def _is_alias(tensor: Tensor, parameter: Tensor) -> bool:
    return tensor.data_ptr() == parameter.data_ptr() and (
        (tensor.shape, tensor.stride(), tensor.dtype) == (parameter.shape, parameter.stride(), parameter.dtype)
    )
