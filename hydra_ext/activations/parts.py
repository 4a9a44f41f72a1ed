"""The parts of a model by which a stash reports its saved tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hydra_ext.calls import is_compiled

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)


def parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The elements of a model's lists of layers, and the modules beside the lists, with names, in the model's order."""
    return list(_parts("", model, inside=False))


def _parts(name: str, module: nn.Module, *, inside: bool) -> Iterator[tuple[str, nn.Module]]:
    """``inside``: the module is an element of a container. It is a part unless it has a list of layers itself."""
    if isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
        return  # calls of scripted modules cannot be seen; the modules of a compiled graph cannot be told apart
    is_container = isinstance(module, _CONTAINERS)
    looked_for = _LISTS if inside else _CONTAINERS
    if is_container or any(isinstance(below, looked_for) for below in module.modules() if below is not module):
        for child_name, child in module.named_children():
            yield from _parts(f"{name}.{child_name}".lstrip("."), child, inside=inside or is_container)
    else:
        yield name, module
