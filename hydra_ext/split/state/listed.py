"""Parameters that modules also hold in other places: in a list, say, beside the modules that they belong to.

If a parameter is replaced in its module, it must be replaced there, too. Otherwise the model would compute with another
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hydra_ext.errors import UnsupportedModel
from hydra_ext.split.state.held import Entry, Root, all_modules, entries, module_roots
from hydra_ext.state.contents import mapped_tuple, set_attribute


def listed_parameters(roots: Sequence[nn.Module]) -> Iterator[tuple[Any, Any, nn.Parameter]]:
    """The container, the key and the parameter for each such place.

    These are places in lists, dicts and objects that modules hold, at any depth; attributes that were set without the
    module's own ``__setattr__``; and modules that are held but not registered.
    """
    for root in roots:
        registered = set(root.modules())
        for module in all_modules(root).values():
            if module not in registered:
                found = module._parameters.items()
                yield from ((module._parameters, key, value) for key, value in found if value is not None)
        for _, entry in _entries(root):
            container = _container(entry)
            if container is not None and isinstance(entry.value, nn.Parameter):
                yield container, entry.key, entry.value


def refuse_in_tuples(roots: Sequence[nn.Module], parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """
    Raises:
        UnsupportedModel: One of these parameters is in a tuple or a slot, too, where no other version can replace it.
    """
    names = {parameter: name for name, parameter in parameters}
    for root in roots:
        for origin, entry in _entries(root):
            if isinstance(entry.value, nn.Parameter) and entry.value in names and _container(entry) is None:
                kind = "tuple" if isinstance(entry.holder, tuple) else type(entry.holder).__name__
                raise UnsupportedModel(
                    f"'{names[entry.value]}' is also in the {kind} {type(origin.module).__name__}.{origin.attribute}, "
                    "where this schedule's versions of the weights cannot take its place: make it a list, or use "
                    "schedule='1f1b'"
                )


def replace_listed(model: nn.Module, substitutes: Mapping[Tensor, Tensor]) -> None:
    """Replaces these parameters by others, in tuples, too."""

    def other(value: Any) -> Any:
        if isinstance(value, tuple):
            return mapped_tuple(value, other)
        return substitutes.get(value, value) if isinstance(value, nn.Parameter) else value

    for container, key, parameter in list(listed_parameters([model])):
        container[key] = other(parameter)
    for _, entry in list(_entries(model)):
        value = other(entry.value)
        if value is not entry.value and not isinstance(entry.holder, tuple):
            container = _container(entry)
            if container is None:
                set_attribute(entry.holder, str(entry.key), value)
            else:
                container[entry.key] = value


def _entries(root: nn.Module) -> Iterator[tuple[Root, Entry]]:
    """All entries that its modules hold, each with the root through which it is reached."""
    roots = module_roots(all_modules(root))
    return ((roots[entry.root], entry) for entry in entries(roots))


def _container(entry: Entry) -> Any:
    """The container in which the entry can be replaced; None if its holder is a tuple, or it is in a slot."""
    holder = entry.holder
    if isinstance(holder, (list, deque)) or (isinstance(holder, dict) and holder.get(entry.key) is entry.value):
        return holder if isinstance(entry.key, int) or isinstance(holder, dict) else holder.__dict__
    attributes = getattr(holder, "__dict__", {})
    return attributes if attributes.get(entry.key) is entry.value else None
