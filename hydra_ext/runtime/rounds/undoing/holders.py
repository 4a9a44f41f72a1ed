"""Finds the modules that hold an object that was written to: the attributes and buffers from which it is reachable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hydra_ext.runtime.rounds.undoing.accesses import Key
from hydra_ext.state.contents import ATTRIBUTES, OF_EVERY_MODULE, classes_of, kinds_of
from hydra_ext.state.memory import storage_key

Holding = frozenset[Key]  # an object, identified by all attributes and buffers from which it is reachable
Written = tuple[nn.Module, Any]  # a module that holds an object, and the object


def holdings(models: Iterable[nn.Module], written: Sequence[Written]) -> list[Holding]:
    """The holding of each object that was written to. If no module holds it any more, the former holder counts."""
    if not written:
        return []
    wanted = {_identity(value) for _, value in written}
    holders: dict[Any, set[Key]] = {identity: set() for identity in wanted}
    modules = [*dict.fromkeys(module for model in models for module in model.modules())]
    known: dict[int, frozenset[Any]] = {id(module): frozenset() for module in modules}
    for module in modules:
        own = [(name, value) for name, value in module.__dict__.items() if name not in OF_EVERY_MODULE]
        for name, value in [*own, *module._buffers.items(), *(("", kind) for kind in classes_of(type(module)))]:
            for identity in _reached(value, wanted, known):
                holders[identity].add((module, name))
    found = {frozenset(holders[_identity(value)] or _all_of(module)) for module, value in written}
    return [*found]


def _all_of(module: nn.Module) -> set[Key]:
    names = [name for name in (*module.__dict__, *module._buffers) if name not in OF_EVERY_MODULE]
    return {(module, name) for name in names or [""]}


def _reached(value: Any, wanted: set[Any], known: dict[int, frozenset[Any]]) -> frozenset[Any]:
    """The wanted identities that are the value's own, or are reachable from it at any depth."""
    if isinstance(value, Tensor):
        return frozenset({_identity(value)} & wanted)
    kinds = () if isinstance(value, nn.Module) and id(value) in known else kinds_of(value)
    if not kinds:
        return frozenset()
    if id(value) not in known:
        known[id(value)] = frozenset()  # ends the recursion for an object that contains itself
        inner = [member for kind in kinds for member in kind.members(kind.save(value))]
        inner += classes_of(type(value)) if ATTRIBUTES in kinds else ()
        found = frozenset[Any]().union(*(_reached(each, wanted, known) for each in inner))
        known[id(value)] = found | ({id(value)} & wanted)
    return known[id(value)]


def _identity(value: Any) -> Any:
    """The identity of an object. Tensors that share a storage have one identity."""
    return ("memory", storage_key(value)) if isinstance(value, Tensor) else id(value)
