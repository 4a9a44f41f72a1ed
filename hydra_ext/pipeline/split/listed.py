"""Parameters that a module also has in attributes of its own: in a list, for instance, beside the modules they are of.

What changes a parameter in its module changes it there too, or else the model would compute with another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hydra_ext.errors import UnsupportedModel

_OF_TORCH = frozenset(nn.Module().__dict__)


def listed_parameters(module: nn.Module) -> Iterator[tuple[Any, Any, nn.Parameter]]:
    """Containers, keys, and the parameters that are there: in the module's lists and dicts, and among its attributes
    where they were set past it; containers inside others are not looked into."""
    for name, value in module.__dict__.items():
        if name in _OF_TORCH:
            continue
        if isinstance(value, nn.Parameter):
            yield module.__dict__, name, value
        elif isinstance(value, (list, dict)):
            members = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((value, key, member) for key, member in members if isinstance(member, nn.Parameter))


def _in_tuples(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names of attributes, and what their tuples hold."""
    for name, value in module.__dict__.items():
        if isinstance(value, tuple):
            yield from ((name, member) for member in value if isinstance(member, nn.Parameter))


def refuse_in_tuples(roots: Sequence[nn.Module], parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """
    Raises:
        UnsupportedModel: one of these parameters is in a tuple too, where no other version can take its place.
    """
    names = {parameter: name for name, parameter in parameters}
    for module in {inner for root in roots for inner in root.modules()}:
        for attribute, parameter in _in_tuples(module):
            if parameter in names:
                raise UnsupportedModel(
                    f"'{names[parameter]}' is also in the tuple {type(module).__name__}.{attribute}, where this "
                    "schedule's versions of the weights cannot take its place: make it a list, or use schedule='1f1b'"
                )


def replace_listed(model: nn.Module, substitutes: Mapping[Tensor, Tensor]) -> None:
    """Puts other parameters in the place of these, in tuples too."""
    for module in model.modules():
        for container, key, parameter in list(listed_parameters(module)):
            if parameter in substitutes:
                container[key] = substitutes[parameter]
        for name in {name for name, parameter in _in_tuples(module) if parameter in substitutes}:
            members = [
                substitutes.get(member, member) if isinstance(member, Tensor) else member
                for member in module.__dict__[name]
            ]
            kind = type(module.__dict__[name])
            module.__dict__[name] = kind(*members) if hasattr(kind, "_fields") else kind(members)
