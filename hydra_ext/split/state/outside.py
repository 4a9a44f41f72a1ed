"""Finds the state that the caller's function can reach without the model. Its reads of this state cannot be watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from hydra_ext.split.state.held import Root, entries, has_own_class
from hydra_ext.state.contents import kinds_of
from hydra_ext.state.foreign import is_installed


def reached_by(function: Callable[..., Any]) -> dict[int, Any]:
    """The containers, arrays and random sources that the function can reach, by their identities.

    Searched are its closure, its defaults, the globals that it names, objects in these, and functions that it calls by
    name. Modules are not searched.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    first = getattr(function, "__func__", function)
    rest: list[Any] = [function]
    while rest:
        value = rest.pop()
        while isinstance(value, (partial, MethodType)):
            rest += (*value.args, *value.keywords.values()) if isinstance(value, partial) else (value.__self__,)
            value = value.func if isinstance(value, partial) else value.__func__
        if isinstance(value, FunctionType):
            if id(value) not in seen and (value is first or not is_installed(value)):
                seen.add(id(value))
                rest += _named_in(value)
            continue
        if id(value) in seen or isinstance(value, nn.Module) or not kinds_of(value):
            continue
        seen.add(id(value))
        held = [entry.value for entry in entries([Root("", None, "", value)])]
        found |= {id(each): each for each in held if kinds_of(each) and not has_own_class(each)}
        rest += [each for each in held if isinstance(each, (FunctionType, MethodType, partial))]
    return found


def _named_in(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the cell is still empty
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)
