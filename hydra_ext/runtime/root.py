"""The root's class: its ``__call__`` opens the window, and closes it on every way out.

Hooks would miss a ``KeyboardInterrupt``; a class of the same name whose ``__call__`` has a ``finally`` does not. Only
the root's class is changed, because libraries find submodules by their exact class. Copies and pickles of the model
have the plain class. The plain class and its metaclass are not notified of the subclass, as some register subclasses.

A model that ``torch.compile`` wrapped before the context calls the plain class's ``__call__``. So the root's call also
has a stand-in, which opens the window unless the swapped class just did.
"""

from __future__ import annotations

import abc
import copy
import copyreg
from typing import Any, Protocol

import torch
from torch import nn

from hydra_ext.calls import StandIn, standing_in
from hydra_ext.runtime.conversions import refuse_changes
from hydra_ext.tracing import not_traced


class RootContext(Protocol):
    """The interface of a model's context that the swapped class uses."""

    def forward(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def unhooked(self) -> Any: ...
    def sync(self) -> None: ...

    @property
    def device(self) -> torch.device: ...


_CONTEXT = "_hydra_ext_context"
_NEW_OBJECT = copyreg.__newobj__  # type: ignore[attr-defined]


@not_traced
def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    plain = type(self).__mro__[1]
    context: RootContext | None = self.__dict__.get(_CONTEXT)
    if context is None:  # a method of the root created it by type(self)(...), as slicing an nn.Sequential does
        return plain.__call__(self, *args, **kwargs)
    top = next(standing_in(self), None)
    if isinstance(top, _RootCall):
        return context.forward(top.inner, args, kwargs)
    return context.forward(lambda *a, **k: plain.__call__(self, *a, **k), args, kwargs)


class _RootCall(StandIn):
    """Called through references to the plain class's ``__call__``; the swapped class's own ``__call__`` bypasses it."""

    def __init__(self, module: nn.Module, context: RootContext) -> None:
        super().__init__(module)
        self._context = context

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._context.forward(self.inner, args, kwargs)


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    context: RootContext | None = self.__dict__.get(_CONTEXT)
    if context is not None:
        with context.unhooked():
            return copy.deepcopy(self, memo)
    made = type(self)
    _set_class(self, made.__mro__[1])
    try:
        return copy.deepcopy(self, memo)
    finally:
        _set_class(self, made)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    context: RootContext | None = self.__dict__.get(_CONTEXT)
    if context is not None:
        context.sync()
    plain: Any = type(self).__mro__[1]
    reduced = list(plain.__reduce_ex__(self, protocol))
    if reduced[0] is _NEW_OBJECT and reduced[1] == (type(self),):
        # With __newobj__ pickle requires the class to be the module's present one.
        reduced[:2] = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
    else:
        reduced[1] = tuple(plain if part is type(self) else part for part in reduced[1])
    if isinstance(reduced[2], dict):
        kept = {key: value for key, value in reduced[2].items() if not isinstance(value, StandIn)}
        reduced[2] = {key: value for key, value in kept.items() if key != _CONTEXT}
    return tuple(reduced)


def _apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    context: RootContext | None = self.__dict__.get(_CONTEXT)
    if context is None:
        plain: Any = type(self).__mro__[1]
        return plain._apply(self, function, recurse)  # type: ignore[no-any-return]
    refuse_changes(self, function, context.device, recurse)
    return self


def _state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    context: RootContext | None = self.__dict__.get(_CONTEXT)
    if context is not None:
        context.sync()  # a state dict's tensors need their bytes to be saved
    plain: Any = type(self).__mro__[1]
    return plain.state_dict(self, *args, **kwargs)


def _device(self: nn.Module) -> torch.device:
    """The device on which the forward runs, as code expects of a model's ``device``."""
    context: RootContext | None = self.__dict__.get(_CONTEXT)
    return context.device if context is not None else type(self).__mro__[1].device.__get__(self)  # type: ignore[attr-defined]


def swap(root: nn.Module, context: RootContext) -> None:
    """Gives the root a class of its own. :func:`restore` undoes it."""
    cls = type(root)
    namespace = {
        "__call__": _call,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce,
        "_apply": _apply,
        "state_dict": _state_dict,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    if isinstance(getattr(cls, "device", None), property):
        namespace["device"] = property(_device)
    root.__dict__[_CONTEXT] = context
    _set_class(root, _subclass(cls, namespace))
    if cls.__call__ is nn.Module.__call__:  # a __call__ of the class's own runs code before the stand-in is reached
        _RootCall(root, context).install()


class _Shield:
    """As the first base, keeps the other base's ``__init_subclass__`` from being called."""

    def __init_subclass__(cls, **_options: Any) -> None:
        pass


def _subclass(cls: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    # Bypasses the metaclass's own __new__ and __init__, but not ABCMeta's: isinstance() would confuse the two classes.
    meta = type(cls)
    new = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
    made: type[nn.Module] = new(meta, cls.__name__, (_Shield, cls), namespace)
    type.__setattr__(made, "__bases__", (cls,))
    return made


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", cls)  # a module may have a __setattr__ of its own


def restore(root: nn.Module) -> None:
    for call in list(standing_in(root)):
        if isinstance(call, _RootCall):
            call.remove()
    _set_class(root, type(root).__mro__[1])
    root.__dict__.pop(_CONTEXT, None)


def is_swapped(module: nn.Module) -> bool:
    return _CONTEXT in module.__dict__


def context_of(module: nn.Module) -> RootContext | None:
    """The context whose root a module is."""
    context: RootContext | None = module.__dict__.get(_CONTEXT)
    return context
