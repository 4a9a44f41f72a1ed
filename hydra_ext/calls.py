"""Stand-ins for a module's call, through the instance attribute that ``nn.Module.__call__`` reads first.

``Module.compile`` sets the same attribute. So a stand-in runs around the user's hooks, and also sees calls that raise.
The class, the hooks and the state of the module stay as they are. While there are stand-ins, ``Module.compile`` puts
the compiled call below them.

``nn.Module`` leaves the attribute out of copies and pickles. If a class copies its whole dictionary, as parametrized
ones do, the copy gets the call that the stand-in has replaced.
"""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

_SLOT = "_compiled_call_impl"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_lock = threading.Lock()  # guards the modules' attributes and the variables below
_standing = 0  # number of stand-ins
_plain_compile: Any = None  # torch's Module.compile while it is replaced


class StandIn:
    """Called in place of ``module._call_impl``, or of the call that was installed before. Subclasses define the call.

    Attributes:
        module: Module whose call is replaced.
        replaced: Call that was installed before; None for ``module._call_impl``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: Any = None

    @property
    def inner(self) -> Callable[..., Any]:
        inner: Callable[..., Any] = self.replaced or self.module._call_impl
        return inner

    def install(self, *, innermost: bool = False) -> None:
        """Replaces the call; ``innermost``, below all stand-ins that there are."""
        with _lock:
            standing = self.module.__dict__.get(_SLOT)
            if any(call is self for call in _chain(standing)):
                return
            lowest = _lowest(standing) if innermost else None
            if lowest is None:
                self.replaced = standing
                self.module.__dict__[_SLOT] = self  # a module may have a __setattr__ of its own
            else:
                self.replaced, lowest.replaced = lowest.replaced, self
            _count(1)

    def remove(self) -> None:
        """Undoes :meth:`install`. Below a call of another kind that was installed since, it stays without effect."""
        with _lock:
            standing = self.module.__dict__.get(_SLOT)
            if any(call is self for call in _chain(standing)):
                _count(-1)
            if standing is self:
                del self.module.__dict__[_SLOT]
                if self.replaced is not None:
                    self.module.__dict__[_SLOT] = self.replaced
            for call in _chain(standing):
                if isinstance(call, StandIn) and call.replaced is self:
                    call.replaced = self.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.replaced, memo)

    def __reduce__(self) -> Any:
        return operator.getitem, ((self.replaced,), 0)  # can be unpickled without hydra_ext


def standing_in(module: nn.Module) -> Iterator[Any]:
    """The call in place of ``module._call_impl``, the one that it replaced, and so on."""
    return _chain(module.__dict__.get(_SLOT))


def is_compiled(module: nn.Module) -> bool:
    """Whether ``Module.compile`` was called, even if a stand-in replaces the compiled call now."""
    return any(not isinstance(call, StandIn) for call in standing_in(module))


def calls_in_turn(module: nn.Module) -> bool:
    """Whether a call of the module does nothing but call its children, each with what the one before it returns."""
    if not isinstance(module, nn.Sequential):
        return False
    kind = type(module)
    return (
        kind.forward is nn.Sequential.forward
        and kind.__iter__ is nn.Sequential.__iter__
        and kind._call_impl is nn.Module._call_impl
        and "forward" not in module.__dict__
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks of its own around its calls."""
    return any(map(module.__dict__.__getitem__, _HOOKS))


def has_forward_hooks_of_user(module: nn.Module) -> bool:
    """Whether hooks of the user run around the forward of the module, or of one inside.

    Those of torch, such as ``weight_norm``'s, compute the same again. Hooks of backward run once, however often a
    forward is made.
    """
    hooks = (
        hook
        for inner in module.modules()
        for hook in (*inner._forward_pre_hooks.values(), *inner._forward_hooks.values())
    )
    return any(not _comes_with(hook, "torch.", "hydra_ext.") for hook in hooks)


def _comes_with(function: Any, *packages: str) -> bool:
    origin: str = getattr(function, "__module__", None) or type(function).__module__
    return origin.startswith(packages)


def same_modules(some: Collection[nn.Module], others: Collection[nn.Module | None]) -> bool:
    """Whether both are the same modules in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _count(change: int) -> None:
    global _standing, _plain_compile
    _standing += change
    if _standing > 0 and _plain_compile is None:
        _plain_compile, nn.Module.compile = nn.Module.compile, _compile  # type: ignore[method-assign]
    elif _standing == 0 and nn.Module.compile is _compile:
        nn.Module.compile, _plain_compile = _plain_compile, None  # type: ignore[method-assign]


@functools.wraps(nn.Module.compile)
def _compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    before = self.__dict__.get(_SLOT)
    _plain_compile(self, *args, **kwargs)
    with _lock:
        lowest = _lowest(before)
        if lowest is not None:
            lowest.replaced, self.__dict__[_SLOT] = self.__dict__.get(_SLOT), before


def _lowest(call: Any) -> StandIn | None:
    """The innermost stand-in of a chain; None if there is none."""
    lowest = None
    for each in _chain(call):
        lowest = each if isinstance(each, StandIn) else lowest
    return lowest


def _chain(call: Any) -> Iterator[Any]:
    """A call, the one that it replaced, and so on."""
    while call is not None:
        yield call
        call = getattr(call, "replaced", None)
